"""The values of options, from their texts; what is wrong with a text is said by argparse."""

from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping

from schedlang.cli.extra import extra
from schedlang.cli.usage import WRITERS, near

#: What `run` can train with.
OPTIMIZERS = ("sgd", "adam", "adamw")
DEVICES = ("cpu", "cuda")


def param(text: str) -> tuple[str, int | tuple[int, ...]]:
    """The parameter and its value in `-p NAME=VALUE`: a number, or a list as in `depth=3,2,1`."""
    name, _, value = text.partition("=")
    try:
        numbers = tuple(map(int, value.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not name.strip():
        raise ArgumentTypeError(
            f"`{text}` is not NAME=VALUE with a whole number, or NAME=VALUE,VALUE,… with a list"
        )
    return name.strip(), numbers if len(numbers) > 1 else numbers[0]


def count(text: str) -> int:
    """A whole number from 1."""
    # Neither a sign nor a point is decimal.
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"`{text}` is not a whole number from 1")
    return int(text)


def natural(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"`{text}` is not a whole number from 0")
    return int(text)


def slow(text: str) -> tuple[str, tuple[tuple[int, ...], float]]:
    """What is slow in `--slow rank=3:1.3` or `--slow link=0-1:2`, as `rank=3`; its one rank or its
    two, and how many times as long it takes.
    """
    what, _, factor = text.partition(":")
    name, _, numbers = what.partition("=")
    wanted = {"rank": 1, "link": 2}
    ranks = numbers.split("-")
    try:
        times = float(factor)
    except ValueError:
        times = 0.0
    is_known = len(ranks) == wanted.get(name) and all(
        rank.isdecimal() for rank in ranks
    )
    if not is_known or not 0 < times < float("inf"):
        raise ArgumentTypeError(
            f"`{text}` is not rank=R:FACTOR or link=R-Q:FACTOR, such as rank=3:1.3, with a factor "
            "above 0"
        )
    # A link is slow both ways.
    ends = tuple(sorted(map(int, ranks)))
    return f"{name}={'-'.join(map(str, ends))}", (ends, times)


def rate(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"`{text}` is not a number above 0")
    return value


def share(text: str) -> float:
    """A number above 0, up to 1."""
    value = rate(text)
    if value > 1:
        raise ArgumentTypeError(f"`{text}` is not a share: a number above 0, up to 1")
    return value


#: What is written behind a number of seconds, or of bytes.
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"GB": 1e9, "GiB": 2.0**30, "MB": 1e6, "MiB": 2.0**20, "B": 1.0}


def seconds(text: str) -> float:
    """A time: `60s`, `2m`, `1h`, or a number of seconds."""
    return _with_unit(text, _SECONDS, "a time above 0, such as 60s or 2m")


def amount(text: str) -> float:
    """An amount of memory: `80GB`, `74.5GiB`, or a number of bytes."""
    what = (
        "an amount of memory above 0, in bytes or with a unit, such as 80GB or 74.5GiB"
    )
    return _with_unit(text, _BYTES, what)


def _with_unit(text: str, units: Mapping[str, float], what: str) -> float:
    """A number above 0, with one of some units behind it or none."""
    unit = next((unit for unit in units if text.endswith(unit)), "")
    try:
        return rate(text.removesuffix(unit).rstrip()) * units.get(unit, 1.0)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"`{text}` is not {what}") from None


def number(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"`{text}` is not a number") from None


def numbers(text: str) -> list[float]:
    """Numbers with commas between them."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"`{text}` is not numbers, such as 1,1,2") from None


def capacities(text: str) -> list[float]:
    """Amounts of memory with commas between them, each a number of bytes, `80GB`, or a device: what
    `tune` counts on of the memory of one.
    """
    return [_capacity(part.strip()) for part in text.split(",")]


def _capacity(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        # It may be a device, or have a unit.
        pass
    if not text[:1].isdigit():
        from schedlang.schedule.costs.devices import DEVICES

        return DEVICES[device(text)].room
    return amount(text)


def counts(text: str) -> list[int]:
    """Whole numbers from 1, with commas between them."""
    return [count(part) for part in text.split(",")]


def one_of(*words: str) -> Callable[[str], str]:
    """What takes one of some words only."""

    def word(text: str) -> str:
        if text not in words:
            there_is = ", ".join(f"`{word}`" for word in words)
            message = f"there is no `{text}`, there is {there_is}{near(text, words)}"
            raise ArgumentTypeError(message)
        return text

    return word


def setting(text: str) -> str:
    """A setting as KEY=VALUE; the value is YAML, and read with the file that it overrides."""
    if "=" not in text:
        raise ArgumentTypeError(f"`{text}` is not KEY=VALUE")
    return text


def transport(text: str) -> str:
    """The name of a transport."""
    from schedlang.schedule.transports import NAMES, transports

    try:
        transports(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{error}{near(text, NAMES)}") from None
    return text


def device(text: str) -> str:
    """The name of an accelerator whose data sheet is known."""
    from schedlang.schedule.costs.devices import DEVICES

    return one_of(*DEVICES)(text)


def width(text: str) -> int | str:
    """How wide a picture is: pixels, or a `column` or a `page` of a paper."""
    if text.isdecimal():
        return count(text)
    from schedlang.report.views.svg import WIDTHS

    return one_of(*WIDTHS)(text)


def kind_of_plot(text: str) -> str:
    """What `schedc view --plot` draws."""
    return one_of(*extra("plots.plot_rows").PLOTS)(text)


def dialect(text: str) -> str:
    """The dialect of tables that a version of torch reads."""
    from schedlang.plan.torch_tables import dialect_of

    try:
        return dialect_of(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def transport_or_all(text: str) -> str:
    """The name of a transport, or `all`: for `check` only, since a plan is proved for one."""
    return text if text == "all" else transport(text)


def sizes(text: str) -> tuple[str, range | None]:
    """A parameter and all its values in `--for NAME=A..B`; None is any value, `NAME=any`."""
    name, _, values = text.partition("=")
    if name and values == "any":
        return name, None
    start, dots, stop = values.partition("..")
    try:
        # One value is a range too.
        chosen = range(int(start), int(stop if dots else start) + 1)
    except ValueError:
        raise ArgumentTypeError(
            f"`{text}` is not NAME=A..B with whole numbers, or NAME=any"
        ) from None
    if not name or not chosen:
        raise ArgumentTypeError(
            f"`{text}` is not NAME=A..B with whole numbers, A up to B"
        )
    from schedlang.cli.sizes import MOST_SIZES

    # `len` would fail for the longest ranges.
    if chosen[-1] - chosen[0] >= MOST_SIZES:
        raise ArgumentTypeError(f"`{text}` is more than {MOST_SIZES:,} sizes")
    return name, chosen


def program(text: str) -> str:
    """The path of a program or another file to read: `-` is standard input, and a name that no file
    has may be that of a program of the gallery.
    """
    from schedlang.files.programs import names, path_of
    from schedlang.files.sources import may_name

    if text == "-" or not may_name(text):
        return text
    known = names()
    if text not in known:
        message = (
            f"there is no file `{text}`, and no program of the gallery has this name"
        )
        raise ArgumentTypeError(f"{message}{near(text, known)}")
    return str(path_of(text))


def data(text: str) -> str:
    """The path of a file of data to write, which has no ending of another kind of file."""
    ending = text.rpartition(".")[2]
    if ending in WRITERS:
        kind = "a table" if ending == "csv" else "a picture"
        raise ArgumentTypeError(
            f"`{text}` is the name of {kind}: {WRITERS[ending].format(text)}"
        )
    return text


def table(text: str) -> str:
    """The path of a table to write."""
    return text if text.endswith(".csv") else data(text)


def window(text: str) -> tuple[float, float]:
    """A stretch of time, `A..B`."""
    start, dots, end = text.partition("..")
    try:
        chosen = float(start), float(end)
    except ValueError:
        chosen = (0.0, 0.0)
    if not dots or not chosen[0] < chosen[1]:
        raise ArgumentTypeError(f"`{text}` is not A..B with two times, A before B")
    return chosen


def ranks(text: str) -> tuple[int, ...]:
    """Some ranks, `0..3,7`."""
    chosen: list[int] = []
    for part in text.split(","):
        start, _, stop = part.partition("..")
        # Neither a sign nor a point is decimal.
        if not start.isdecimal() or not (stop or start).isdecimal():
            raise ArgumentTypeError(f"`{text}` is not numbers of ranks, such as 0..3,7")
        chosen += range(int(start), int(stop or start) + 1)
    if not chosen:
        raise ArgumentTypeError(f"`{text}` names no rank")
    return tuple(dict.fromkeys(chosen))
