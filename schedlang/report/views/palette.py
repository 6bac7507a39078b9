"""The colours of all views, as in the figures of the papers: forwards blue, backwards green, weight
halves amber.

Kinds differ in lightness as well as in hue, each in its own band for all chunks, so that they stay
apart in grey print and for colour-blind eyes. The chunks of a rank go from a band's light end to
its dark one. A recomputation is a forward again: its blue, hatched. An optimizer step is drawn in
the colour of the text.
"""

from schedlang.schedule.kinds import Kind

Rgb = tuple[int, ...]

INK = "#10151c"
PAPER = "#ffffff"
#: What is written on a box, whichever reads better.
_INKS = (INK, PAPER)
#: The ends of each band.
_BANDS = {
    Kind.F: ("#97d0f1", "#69a6f3"),
    Kind.B: ("#317e42", "#07492c"),
    Kind.I: ("#3fab8b", "#008c98"),
    Kind.W: ("#faefad", "#ffc86b"),
    Kind.R: ("#97d0f1", "#69a6f3"),
    Kind.U: (INK, INK),
    Kind.OFFLOAD: ("#c882c2", "#c882c2"),
    Kind.RELOAD: ("#a45b9f", "#a45b9f"),
}
HATCHED = (Kind.R,)

#: The strip along a box for the version of the weights that it reads; version 4 looks like version
#: 0 again.
VERSIONS = ("#e3e7ec", "#a9b2bd", "#6b7683", "#10151c")

NAMES: dict[int, str] = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward, input half",
    Kind.W: "weight half",
    Kind.R: "recomputed forward",
    Kind.U: "optimizer step",
    Kind.OFFLOAD: "copy to host",
    Kind.RELOAD: "copy back",
}


def fill(kind: int, chunk: int, chunks: int) -> str:
    """The colour of a box, `#rrggbb`: of a kind, of a chunk among so many."""
    first, last = map(_rgb, _BANDS[Kind(kind)])
    share = chunk / max(chunks - 1, 1)
    return "#" + "".join(
        f"{round(a + (b - a) * share):02x}" for a, b in zip(first, last, strict=True)
    )


def version(number: int) -> str:
    """The colour of the strip for a version of the weights."""
    return VERSIONS[number % len(VERSIONS)]


def ink(fill: str) -> str:
    """The colour for text on a box."""
    return max(_INKS, key=lambda each: contrast(each, fill))


def contrast(a: str, b: str) -> float:
    """The contrast ratio of two colours, from 1 to 21 (Web Content Accessibility Guidelines
    2.1).
    """
    dark, light = sorted(map(luminance, (a, b)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    """How light a colour is, from 0 to 1, which is what grey print keeps of it."""
    parts = [part / 255 for part in _rgb(colour)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def terminal_colour(colour: str) -> int:
    """The nearest colour of the cube that terminals with 256 colours have."""
    steps = (0, 95, 135, 175, 215, 255)
    red, green, blue = (min(range(6), key=lambda i: abs(steps[i] - part)) for part in _rgb(colour))
    return 16 + 36 * red + 6 * green + blue


def _rgb(colour: str) -> Rgb:
    return tuple(bytes.fromhex(colour.removeprefix("#")))
