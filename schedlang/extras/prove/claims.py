"""What a program claims `for all` sizes."""

from schedlang.diagnostics.source import Source
from schedlang.language import syntax
from schedlang.language.codegen import generate


def claims_for_all(tree: syntax.Schedule, source: Source) -> tuple[str, ...]:
    """These claims, in the order and the words of the program."""
    sites = generate(tree, frozenset(), False).sites.claims.values()
    spans = sorted(
        (site.condition.span for site in sites if site.for_all),
        key=lambda span: span.start,
    )
    return tuple(" ".join(source.text[span.start : span.end].split()) for span in spans)
