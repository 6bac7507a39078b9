"""Programs written in any way: the tokens of a text with other line ends, blanks and comments
between them.
"""

import random

from schedlang.language.grammar import tokens_of

_COMMENTS = ("#", "# a comment", "#a { brace", '# "quoted', "#\t tabs  ", "# ümlaut …")


def scattered(text: str, rng: random.Random) -> str:
    """A text with the same tokens. Few gaps change, or all: what is nearly in style, and what is
    not at all.
    """
    changes = rng.choice((0.02, 0.2, 1.0))
    comments = rng.choice((0.0, 0.02, 0.2))
    pieces = []
    end = 0
    for token in tokens_of(text):
        gap = text[end : token.start_pos]
        if rng.random() < changes:
            gap = _gap(rng, comments)
        if "#" in gap and "\n" not in gap[gap.rindex("#") :]:
            gap += "\n"
        # Words would run together, and so might operators.
        pieces += [gap or " ", token]
        end = token.end_pos or 0
    return "".join(pieces) + _gap(rng, comments)


def _gap(rng: random.Random, comments: float) -> str:
    gap = rng.choice(("", " ", "  ", "\t", "\n", "\n\n", "\n\n\n  ", "\r\n "))
    while rng.random() < comments:
        gap += f" {rng.choice(_COMMENTS)}{rng.choice((chr(10), chr(10) * 3))}"
    return gap
