"""The colours of all views; those of an op stand in the row of its kind.

As in the figures of the papers, forwards are blue, backwards green, and weight halves amber. Kinds
differ in lightness too, each in a band of its own for all chunks; those whose bands touch have
patterns. So they can be told apart in grey print, and by colour-blind readers. The chunks of a rank
go from the light end of a band to its dark end. A recomputation is a forward again, in its blue,
but hatched. An optimizer step is drawn in the colour of the text.
"""

from schedlang.schedule.kinds import OPS

Rgb = tuple[int, ...]

INK = "#10151c"
PAPER = "#ffffff"
#: A claim that does not hold, and its rank.
WRONG = "#b3261e"
#: The colours of what is written on a box: the one that reads better is taken.
_INKS = (INK, PAPER)

#: How idle time of each cause looks: its colour, and the pattern that is drawn in it. Causes of one
#: family have one colour, so that the pattern tells them apart also where colours do not.
IDLE = {
    "fill": ("#66717e", "plain"),
    "drain": ("#66717e", "dots"),
    "dependency": ("#b3261e", "rising"),
    "imbalance": ("#b3261e", "crossed"),
    "memory": ("#7a3fb5", "upright"),
    "order": ("#a65e00", "level"),
    "transfer": ("#0f6f9e", "falling"),
    "transport": ("#0f6f9e", "grid"),
    "copy": ("#a8327d", "rings"),
    "collective": ("#5a6b00", "waves"),
}
#: How much of a cause's colour there is in what lies below its pattern, in the pattern, and in what
#: stands for both where idle times are too short for one; the rest is the colour of the row.
IDLE_SHARES = {"ground": 0.14, "ink": 0.66, "dense": 0.4}
#: How much of the colour of a box's letters there is in the pattern below them.
_OP_SHARE = 0.3
#: The lines of each pattern on a tile: as the data of an SVG path, how wide they are, and how they
#: end; and how large the tile is.
TILE = 8
PATTERNS = {
    "plain": ("", 1.1, "butt"),
    "dots": ("M2 2h.01M6 6h.01", 1.8, "round"),
    "rising": ("M-2 2L2-2M0 8L8 0M6 10L10 6", 1.1, "butt"),
    "crossed": ("M0 8L8 0M0 0L8 8", 1.1, "butt"),
    "upright": ("M2 0V8M6 0V8", 1.1, "butt"),
    "level": ("M0 2H8M0 6H8", 1.1, "butt"),
    "falling": ("M-2 6L2 10M0 0L8 8M6-2L10 2", 1.1, "butt"),
    "grid": ("M0 4H8M4 0V8", 1.1, "butt"),
    "rings": ("M2 4a2 2 0 1 0 4 0a2 2 0 1 0-4 0", 1.1, "butt"),
    "waves": ("M0 5L2 3L4 5L6 3L8 5", 1.1, "butt"),
    "dashes": ("M0 2H3M4 6H7", 1.1, "butt"),
    "crosses": ("M.5 2H3.5M2 .5V3.5M4.5 6H7.5M6 4.5V7.5", 1.1, "butt"),
}

#: The colours of the strip along a box, for the version of the weights that it reads. There are as
#: many as can be told apart, so version 4 looks like version 0 again.
VERSIONS = ("#e3e7ec", "#a9b2bd", "#6b7683", "#10151c")


def fill(kind: int, chunk: int, chunks: int) -> str:
    """The colour of a box, `#rrggbb`: of a kind, and of one chunk among several."""
    light, dark = map(_rgb, OPS[kind].colours)
    share = chunk / max(chunks - 1, 1)
    parts = [round(a + (b - a) * share) for a, b in zip(light, dark, strict=True)]
    return "#" + "".join(f"{part:02x}" for part in parts)


def lines(fill: str) -> str:
    """The colour of the pattern on a box."""
    return mixed(ink(fill), _OP_SHARE, fill)


def version(number: int) -> str:
    """The colour of the strip for a version of the weights."""
    return VERSIONS[number % len(VERSIONS)]


def ink(fill: str) -> str:
    """The colour for text on a box."""
    return max(_INKS, key=lambda colour: contrast(colour, fill))


def mixed(colour: str, share: float, other: str) -> str:
    """So much of one colour in another."""
    parts = zip(_rgb(colour), _rgb(other), strict=True)
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in parts)


def contrast(a: str, b: str) -> float:
    """The contrast of two colours, from 1 to 21 (Web Content Accessibility Guidelines 2.1)."""
    dark, light = sorted(map(luminance, (a, b)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    """How light a colour is, from 0 to 1: what grey print keeps of it."""
    red, green, blue = (_linear(part / 255) for part in _rgb(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(part: float) -> float:
    """A part of a colour in sRGB, from 0 to 1, as an amount of light."""
    if part <= 0.04045:
        return part / 12.92
    amount: float = ((part + 0.055) / 1.055) ** 2.4
    return amount


def terminal_colour(colour: str) -> int:
    """The number of the nearest colour of a terminal with 256 colours.

    Its colours from 16 on are a cube, with six steps of red, green and blue.
    """
    steps = (0, 95, 135, 175, 215, 255)

    def nearest(part: int) -> int:
        return min(range(6), key=lambda step: abs(steps[step] - part))

    red, green, blue = map(nearest, _rgb(colour))
    return 16 + 36 * red + 6 * green + blue


def _rgb(colour: str) -> Rgb:
    return tuple(bytes.fromhex(colour.removeprefix("#")))
