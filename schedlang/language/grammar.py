"""The grammar, ready to parse, and the words of the language, which it alone knows."""

import re
from functools import cache, lru_cache

from lark import Lark, Token

from schedlang.files.cache import folder
from schedlang.files.package import GRAMMAR
from schedlang.schedule.kinds import OPS

#: The terminal of the end of the text, as lark names it.
END = "$END"
#: How each word of the language stands in a program, but for ops; by the name of its terminal.
FORMS = {
    "AND": "if r > 0 and r < 3 { … }",
    "ASSERT": 'assert bubble <= ranks, "why"',
    "AT": "F(s, m) at s",
    "BLOCK": "block m every 3 { … }",
    "BY": "for m in 0 .. microbatches by -1 { … }",
    "CAPACITY": "capacity(r) = 80000000000",
    "COST": "cost B(s) = 2 + s",
    "ELSE": "if r == 0 { … } else { … }",
    "EDGE": "edge s in 0 .. ranks - 1 from s to s + 1",
    "EVERY": "block m every 3 { … }",
    "EXCHANGE": "exchange F(next)",
    "FILL": "fill W within 4",
    "FN": "fn half(n) = n / 2",
    "FOR": "for m in 0 .. microbatches { … }",
    "FROM": "skip s in 0 .. 3 from s to 7 - s",
    "FROZEN": "frozen 0 .. 2",
    "GATHER": "gather within 2",
    "GRADIENTS": "send gradients(s)",
    "GREEDY": "greedy",
    "IF": "if r == 0 { … } else { … }",
    "IMPORT": 'import "lib/v.sched"',
    "IN": "for m in 0 .. microbatches { … }",
    "KEEPER": "keeper(r) = ranks - 1 - r",
    "LET": "let half = ranks / 2",
    "LINK": "link(r) = r / 2",
    "MEMORY": "memory F = 2",
    "MODEL": "model teacher runs microbatches stage s in 0 .. ranks on s",
    "NEXT": "F(next)",
    "NOT": "if not (r == 0) { … }",
    "OBJECTIVE": "objective span",
    "ON": "stage s in 0 .. ranks on s",
    "OR": "if r == 0 or r == 3 { … }",
    "OVERLAP": "overlap { F(next)  B(next) }",
    "PARAM": "param chunks = 2",
    "PIPELINE": "pipeline down runs microbatches stage s in 0 .. ranks on s",
    "RANK": "rank r { … }",
    "RECOMPUTE": "recompute 0 .. ranks",
    "RECV": "recv F(next)",
    "REORDER": "reorder",
    "REPEAT": "repeat microbatches { … }",
    "REQUIRE": 'require ranks > 1, "why"',
    "RUN": "run drain(3)",
    "RUNS": "pipeline down runs microbatches stage s in 0 .. ranks on s",
    "SCHEDULE": "schedule name { … }",
    "SEND": "send F(next)",
    "SEQ": "seq drain(n) { … }",
    "SKIP": "skip s in 0 .. 3 from s to 7 - s",
    "SQUEEZE": "squeeze",
    "STAGE": "stage s in 0 .. ranks on s",
    "STEADY": "steady { … }",
    "SUM": "cost sum(s) = 3",
    "THEN": "let half = if ranks > 1 then ranks / 2 else 1",
    "TO": "skip s in 0 .. 3 from s to 7 - s",
    "WARMUP": "warmup { … }",
    "WEIGHTS": "weights delay(1) on 0 .. ranks",
    "WITHIN": "fill W within 4",
}


@cache
def grammar() -> Lark:
    """The parser of the grammar's rules `schedule` and `items`."""
    return Lark(
        grammar_text(),
        parser="lalr",
        lexer="basic",
        # No text is parsed as `foreign`: the rule is here so that the lexer keeps its terminal.
        start=["schedule", "items", "foreign"],
        propagate_positions=True,
        maybe_placeholders=True,
        cache=_cache_file() or False,
    )


def grammar_text() -> str:
    """The grammar of the language, with the words of kinds that are not among its own."""
    text = GRAMMAR.read_text(encoding="utf-8")
    for op in OPS.values():
        if not re.search(rf'^\w+: "{op.word.split()[0]}"$', text, re.M):
            name = op.word.upper()
            text += f'\n{name}: "{op.word}"\n'
            for rule in ("kind", "timed", "held"):
                text += f"%extend {rule}: {name}\n"
    return text


@lru_cache(maxsize=4)
def tokens_of(text: str) -> tuple[Token, ...]:
    """The tokens of a text, whether it is a program or not.

    Those of the last few texts are kept: an editor asks for several things of each.
    """
    # `Lark.lex` would make its lexer anew each time.
    parser = grammar().parse_interactive(text, start="items")
    return tuple(parser.lexer_thread.lex(parser.parser_state))  # type: ignore[no-untyped-call]


def _cache_file() -> str | None:
    """Where the built grammar is kept: it takes longer to build than most programs take to
    compile.
    """
    cache_folder = folder()
    return None if cache_folder is None else str(cache_folder / "grammar")


@cache
def spellings() -> dict[str, str]:
    """How each terminal that has one spelling is written."""
    return {
        terminal.name: terminal.pattern.value
        for terminal in grammar().terminals
        if terminal.pattern.type == "str"
    }


@cache
def patterns() -> dict[str, str]:
    """The regular expression of each other terminal, without characters that cannot be seen."""
    shown = str.maketrans({"\n": r"\n", "\r": r"\r", "\t": r"\t"})
    return {
        terminal.name: terminal.pattern.value.translate(shown)
        for terminal in grammar().terminals
        if terminal.pattern.type == "re"
    }


@cache
def words() -> dict[str, str]:
    """The words of the language, by the names of their terminals."""
    return {name: text for name, text in spellings().items() if text.isalpha()}


@cache
def reserved() -> frozenset[str]:
    """The terminals of words that cannot be names."""
    may_be_names = {
        symbol.name
        for rule in grammar().rules
        if rule.origin.name == "word"
        for symbol in rule.expansion
    }
    return frozenset(words()) - may_be_names
