"""Programs that may train a model: whether each is suitable, and which parameters to try."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path

from attrs import field, frozen

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.diagnostics.source import Source
from schedlang.files.programs import names, path_of
from schedlang.files.sources import may_name, source_of
from schedlang.language import syntax
from schedlang.language.declarations import Unfinished, declare
from schedlang.language.expressions import Call, Element, Reference
from schedlang.language.faults import Fault
from schedlang.language.loading import load
from schedlang.language.names import check_names
from schedlang.schedule.layout import Layout

#: The parameters that the size of the training sets.
SIZES = ("ranks", "microbatches")
#: Statements besides ops that make a program less simple.
_DIRECTIVES = (
    syntax.Pass,
    syntax.PerRank,
    syntax.Overlap,
)
#: Multiples of its default at which a parameter is tried, besides powers of two.
_SHARES = ((1, 2), (3, 4), (3, 2), (2, 1))
#: Powers of two go up to twice the default, and at least up to this.
_MOST_AT_LEAST = 8


@frozen
class Program:
    """A program, and the `word` that names it on the command line."""

    word: str
    source: Source = field(repr=False)

    @property
    def tree(self) -> syntax.Schedule:
        """Its syntax tree, with what it imports."""
        return loaded(self.source)[1]

    @property
    def parameters(self) -> list[str]:
        """The names of its parameters, without sizes."""
        items = [item for item in self.tree.items if isinstance(item, syntax.Param)]
        return [item.name.text for item in items if item.name.text not in SIZES]

    @property
    def simplicity(self) -> "Simplicity":
        """How simple the program is."""
        return _simplicity(self.source)

    @property
    def placing(self) -> set[str]:
        """The names on which the placement of stages depends: those in statements of stages and
        pipelines, and in values and functions that are used there.
        """
        items = self.tree.items
        places = [
            item for item in items if isinstance(item, syntax.Stage | syntax.Pipeline)
        ]
        values = [
            item
            for item in items
            if isinstance(item, syntax.Let | syntax.List | syntax.Fn)
        ]
        known: dict[str, syntax.Node] = {item.name.text: item for item in values}
        left: list[syntax.Node] = [*places]
        used: set[str] = set()
        # From the statements that place stages back through the values that they use.
        while left:
            words = _words(left.pop())
            left += [known[word] for word in words - used if word in known]
            used |= words
        return used


@cache
def loaded(source: Source) -> tuple[Source, syntax.Schedule]:
    """A program with its imports, loaded once in each process."""
    return load(source)


@frozen
class Simplicity:
    """The simplicity of a program; less is simpler: the number of `kinds` of ops besides F and B,
    of `directives` (such as a pass, a `keeper` or an `overlap`), and of `lines` without comments.
    """

    kinds: int
    directives: int
    lines: int


@cache
def _simplicity(source: Source) -> Simplicity:
    """`Program.simplicity`, computed once in each process."""
    nodes = list(syntax.walk(loaded(source)[1]))
    kinds = {node.kind for node in nodes if isinstance(node, syntax.Op)}
    if any(isinstance(node, syntax.Pass) and node.name == "fill" for node in nodes):
        kinds.add("W")
    directives = [node for node in nodes if isinstance(node, _DIRECTIVES)]
    lines = [line.strip() for line in source.text.splitlines()]
    written = [line for line in lines if line and not line.startswith("#")]
    return Simplicity(len(kinds - {"F", "B"}), len(directives), len(written))


def _words(item: syntax.Node) -> set[str]:
    """The names that an item uses."""
    words = set()
    for node in syntax.walk(item):
        if isinstance(node, Reference):
            words.add(node.name)
        elif isinstance(node, Call | Element):
            words.add(node.name.text)
    return words


def read_programs(paths: Iterable[str]) -> list[Program]:
    """Read the programs at these paths, or the whole gallery without paths. CompileError for a
    program that cannot be read, or that is wrong at every size.
    """
    chosen = list(paths) or [str(path_of(name)) for name in names()]
    programs = [Program(_word(path), source_of(path)) for path in chosen]
    for program in programs:
        wrong = [] if program.source.is_plan else check_names(*loaded(program.source))
        if wrong:
            raise CompileError(wrong)
    return programs


def _word(path: str) -> str:
    """The word that names a program on the command line: its path, or its name in the gallery."""
    name = Path(path).stem
    return name if path == str(path_of(name)) and may_name(name) else path


def unlike(program: Program, fixed: Mapping[str, int]) -> str | None:
    """The reason why a program is no alternative for training: it computes other gradients, needs
    another model, or has a parameter that is neither `fixed` nor has a default. None if it is one.
    """
    items = [item for item in program.tree.items if isinstance(item, syntax.Param)]
    known = {*SIZES, *fixed}
    for item in items:
        if item.default is None and item.name.text not in known:
            return (
                f"`{item.name.text}` has no value: give one with -p {item.name.text}=4"
            )
    nodes = list(syntax.walk(program.tree))
    kinds = {node.kind for node in nodes if isinstance(node, syntax.Op)}
    if not kinds & {"B", "BW", "I"}:
        return "no backward: it is for inference"
    if any(isinstance(node, syntax.Part) for node in nodes):
        return "gradients of older weights: it has no flush"
    if any(
        isinstance(node, syntax.Pipeline) and node.word == "model" for node in nodes
    ):
        return "several models"
    if any(isinstance(node, syntax.Edge) for node in nodes):
        return "edges between stages, which the model must have"
    if any(isinstance(node, syntax.Frozen) for node in nodes):
        return "frozen stages, which the model must have"
    if kinds & {"send weights", "send gradients"}:
        return "weights that travel, of which a rank does not hold all that it has stages of"
    if "exchange F" in kinds:
        return "exchanges between stages, which the model must have"
    times = [node for node in nodes if type(node) is syntax.Cost and node.word == "F"]
    if any(node.indices for node in times):
        return "stages of unequal work, into which the model must be cut"
    if "slices" in program.parameters:
        return "slices of the sequence, which the model must take, and whose costs are not known"
    return None


@frozen
class Setting:
    """Values of some parameters of a program, and the resulting layout."""

    params: dict[str, int]
    layout: Layout


def settings(
    program: Program, sizes: Mapping[str, int], fixed: Mapping[str, int]
) -> Iterator[Setting]:
    """The settings of a program to try at a size.

    Parameters that place stages are tried in all combinations. Of the others that are not `fixed`,
    one at a time has a value besides its default: a power of two, or a simple multiple of the
    default. The program may still refuse some of these settings.
    """
    given = dict(fixed) | dict(sizes)
    free = [name for name in program.parameters if name not in given]
    placing = [name for name in free if name in program.placing]
    others = [name for name in free if name not in placing]
    for structure in _combinations(program, given, placing):
        values, layout = _declared(program, given | structure)
        chosen = dict(fixed) | structure
        if layout is not None:
            yield Setting(chosen, layout)
        for name in others:
            for value in _values(values.get(name)):
                changed = layout
                # The program may require a value other than the default.
                if changed is None:
                    _, changed = _declared(program, given | structure | {name: value})
                if changed is not None:
                    yield Setting(chosen | {name: value}, changed)


def _combinations(
    program: Program, given: dict[str, int], names: list[str]
) -> Iterator[dict[str, int]]:
    """All combinations of values for these parameters; the first one is empty: all defaults."""
    defaults, _ = _declared(program, given)
    choices: list[list[dict[str, int]]] = []
    for name in names:
        choices.append([{}, *({name: value} for value in _values(defaults.get(name)))])
    for combination in product(*choices):
        yield {name: value for chosen in combination for name, value in chosen.items()}


def _values(default: int | None) -> list[int]:
    """The values of a parameter to try, besides its default."""
    if default is None:
        return []
    most = max(2 * default, _MOST_AT_LEAST)
    values = {default * share // whole for share, whole in _SHARES}
    values |= {2**power for power in range(most.bit_length()) if 2**power <= most}
    return sorted(value for value in values if value > 0 and value != default)


def _declared(
    program: Program, params: Mapping[str, int]
) -> tuple[dict[str, int], Layout | None]:
    """The values of all parameters that the program declares before an error, and the layout, or
    None if there is an error.
    """
    try:
        declared = declare(program.tree, params)
        return declared.params, declared.layout()
    except Unfinished as unfinished:
        return unfinished.declared.params, None
    except Fault:
        return declared.params, None
