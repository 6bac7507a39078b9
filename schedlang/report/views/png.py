"""An SVG as a PNG, drawn by resvg."""

from schedlang.report.views.svg import FONTS

#: Pixels of the image for one of the SVG, so that it is sharp on paper and on fine screens.
_ZOOM = 2.0
#: An image with one letter, or without any.
_LETTER = (
    f'<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20" font-family="{FONTS}">'
    '<text y="15">{}</text></svg>'
)


def of_image(width: int | str | None) -> int | str | None:
    """The width of the SVG for an image of so many pixels; a word is the width of the SVG."""
    return round(width / _ZOOM) if isinstance(width, int) else width


def png_of(picture: str) -> bytes:
    """The content of the file, of an SVG.

    ImportError says what is missing: the package that draws, or a font for the numbers.
    """
    try:
        from resvg_py import svg_to_bytes
    except ImportError:
        raise ImportError("a PNG needs resvg: pip install 'schedlang[png]'") from None
    # Without a font, resvg leaves out the text and says nothing.
    if svg_to_bytes(_LETTER.format("0")) == svg_to_bytes(_LETTER.format("")):
        raise ImportError(
            f"a PNG needs a font of these on this machine: {FONTS}; Debian has fonts-dejavu-core"
        )
    return svg_to_bytes(picture, zoom=_ZOOM)
