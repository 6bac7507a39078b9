"""The reference of what Python offers, from the docstrings; a page of the site.

griffe reads signatures and docstrings from the source, so nothing is imported, torch neither.
"""

import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]

HEAD = """\
# Python, all of it

What `import schedlang`, `import schedlang.runtime` and `import schedlang.torch` offer, in the words of their docstrings.
[Schedules in Python](python.md) begins with examples.

A wrong argument is a TypeError or ValueError that names it, at once. What is wrong with a program or a plan is a
`CompileError`, with places; what stops a training run is a `PipelineError`, on all ranks.
"""

#: The names of each package, in the order in which they are read; each stands in one section.
SECTIONS = {
    "schedlang": {
        "Compile and simulate": [
            "load",
            "compile",
            "simulate",
            "simulate_runs",
            "sweep",
            "plot",
            "view",
            "prove",
            "Builder",
        ],
        "Every size": ["prove_for_all", "Proof", "Verdict", "Law"],
        "Files": [
            "read_source",
            "read_costs",
            "read_plan",
            "open_plan",
            "write_plan",
            "write_view",
        ],
        "Programs and plans": [
            "Source",
            "Plan",
            "Schedule",
            "Layout",
            "Pipeline",
            "Actions",
            "Kind",
        ],
        "Time and memory": [
            "Costs",
            "Execution",
            "Timeline",
            "Bar",
            "Noise",
            "Runs",
            "Delays",
            "Plot",
            "View",
        ],
        "What is wrong": ["CompileError", "ParameterError", "Diagnostic"],
    },
    "schedlang.runtime": {
        "Training": ["Pipeline", "PipelineError", "Standby", "error_feedback"],
        "Generating text": ["Decoding"],
        "Models": [
            "split",
            "EvenLayers",
            "measure",
            "load_model",
            "load_optimizers",
            "load_state",
            "dcp_state",
            "load_dcp",
        ],
        "Losses": ["add_loss", "added_losses"],
        "Overlap": ["end_component", "OverlappedForward", "OverlappedBackward"],
    },
    "schedlang.torch": {
        "Torch's own pipelining": ["schedule", "pipeline", "TorchPipeline"],
    },
}

#: The most characters of a signature on one line.
WIDTH = 100


def page() -> str:
    """The page."""
    packages = griffe.load("schedlang", search_paths=[str(ROOT)], resolve_aliases=True)
    parts = [HEAD]
    for package, sections in SECTIONS.items():
        parts.append(f"## `{package}`\n")
        names = [name for section in sections.values() for name in section]
        links = [f"[`{name}`](#{anchor(package, name)})" for name in names]
        parts.append(f"{', '.join(links)}.\n")
        for title, section in sections.items():
            parts.append(f"### {title}\n")
            for name in section:
                parts += entry(package, name, definition(packages, package, name))
    return "\n".join(parts)


def anchor(package: str, name: str) -> str:
    """Where a name stands in the page: Markdown makes it of the heading."""
    return f"{package}.{name}".replace(".", "").lower()


def definition(
    packages: griffe.Object | griffe.Alias, package: str, name: str
) -> griffe.Object:
    """What a public name stands for."""
    inner = package.removeprefix("schedlang").lstrip(".")
    found = packages[f"{inner}.{name}" if inner else name]
    # A package hands on what its modules define.
    while isinstance(found, griffe.Alias):
        found = found.final_target
    assert isinstance(found, griffe.Object)
    return found


def entry(package: str, name: str, thing: griffe.Object) -> Iterator[str]:
    """A function, or a class with its public members."""
    yield f"#### `{package}.{name}`\n"
    if isinstance(thing, griffe.Function):
        yield code(signature(name, thing))
    elif isinstance(thing, griffe.Class):
        yield code(head_of_class(name, thing))
    yield from told(thing)
    if isinstance(thing, griffe.Class):
        yield from members(name, thing)


def told(thing: griffe.Object) -> Iterator[str]:
    """Its docstring, or the comment above it, which stands for one."""
    if thing.docstring:
        yield f"{thing.docstring.value}\n"
    elif isinstance(thing, griffe.Attribute):
        comment = [
            line.strip().removeprefix("#:").strip() for line in comment_above(thing)
        ]
        yield "\n".join(comment) + "\n"


def comment_above(thing: griffe.Object) -> list[str]:
    """The lines of the comment right above a definition."""
    assert isinstance(thing.filepath, Path)
    assert thing.lineno is not None
    lines = thing.filepath.read_text(encoding="utf-8").splitlines()[: thing.lineno - 1]
    # Upwards from the definition, as long as lines are comments.
    above = takewhile(lambda line: line.strip().startswith("#"), reversed(lines))
    return list(above)[::-1]


def code(text: str) -> str:
    """A block that is no script: signatures are not for running."""
    return f"```text\n{text}\n```\n"


def signature(name: str, function: griffe.Function, of: str = "") -> str:
    """How a function is called, with a line for each parameter where one line is too long."""
    parameters = list(written(function))
    has_result = function.returns is not None and function.name != "__init__"
    result = f" -> {typed(function, function.returns)}" if has_result else ""
    line = f"{of}{name}({', '.join(parameters)}){result}"
    if len(line) <= WIDTH:
        return line
    lines = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"{of}{name}(\n{lines}){result}"


def written(function: griffe.Function) -> Iterator[str]:
    """The parameters as they are written, without `self`."""
    has_star = False
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is griffe.ParameterKind.keyword_only and not has_star:
            has_star = True
            yield "*"
        stars = {
            griffe.ParameterKind.var_positional: "*",
            griffe.ParameterKind.var_keyword: "**",
        }.get(parameter.kind or griffe.ParameterKind.positional_or_keyword, "")
        has_star |= stars == "*"
        text = f"{stars}{parameter.name}"
        if parameter.annotation:
            text += f": {typed(function, parameter.annotation)}"
        if parameter.default is not None and not stars:
            text += f" = {value(function, str(parameter.default))}"
        yield text


def value(thing: griffe.Object, text: str) -> str:
    """A name that stands for a value or a type, such as `UNIT`, as what it stands for; other text
    as it is.
    """
    named = thing.module.members.get(text)
    while isinstance(named, griffe.Alias):
        # Of another package only the name is known.
        if not named.target_path.startswith("schedlang."):
            return text
        named = named.final_target
    return str(named.value) if isinstance(named, griffe.Attribute) else text


def typed(thing: griffe.Object, annotation: object) -> str:
    """An annotation, with what its names stand for."""
    return re.sub(
        r"(?<![\w.])[A-Za-z_]\w*(?![\w.])",
        lambda name: value(thing, name[0]),
        str(annotation),
    )


def head_of_class(name: str, of: griffe.Class) -> str:
    """How an object is made: by the constructor that is written, or by the fields."""
    init = of.members.get("__init__")
    if isinstance(init, griffe.Function) and init.lineno:
        return signature(name, init)
    bases = ", ".join(map(str, of.bases))
    lines = [f"class {name}({bases}):" if bases else f"class {name}:"]
    lines += fields(of)
    return "\n".join(lines)


def fields(of: griffe.Class) -> Iterator[str]:
    """The lines of the fields of a class, with the comments above them."""
    for member in of.members.values():
        if not isinstance(member, griffe.Attribute) or "property" in member.labels:
            continue
        if member.name.startswith("_") or not member.lineno:
            continue
        yield from comment_above(member)
        default = default_of(member)
        line = f"    {member.name}: {typed(of, member.annotation)}"
        yield f"{line} = {value(of, default)}" if default else line


def default_of(field: griffe.Attribute) -> str:
    """What a field is if it is not given; nothing if it must be."""
    if not isinstance(field.value, griffe.ExprCall):
        return "" if field.value is None else str(field.value)
    for argument in field.value.arguments:
        if isinstance(argument, griffe.ExprKeyword) and argument.name == "default":
            return str(argument.value)
        if isinstance(argument, griffe.ExprKeyword) and argument.name == "factory":
            made = argument.value
            if isinstance(made, griffe.ExprLambda):
                return str(made.body)
            return f"{made}()"
    return ""


def members(name: str, of: griffe.Class) -> Iterator[str]:
    """Its public methods and properties."""
    for member in of.members.values():
        if member.name.startswith("_") or not member.has_docstring:
            continue
        if isinstance(member, griffe.Function):
            yield f"**`{name}.{member.name}`**\n"
            yield code(signature(member.name, member))
            yield from told(member)
        elif isinstance(member, griffe.Attribute):
            yield f"**`{name}.{member.name}: {typed(of, member.annotation)}`**\n"
            yield from told(member)
