"""An SVG as a PDF that is cropped to it, with its fonts in it: by typst, a typesetting system."""

#: A document of one page, as large as the picture that is on it.
_DOCUMENT = b"""\
#set page(width: auto, height: auto, margin: 0pt)
#image(bytes(sys.inputs.picture), format: "svg", width: eval(sys.inputs.width))
"""
#: The points of a pixel of an SVG: there are 96 pixels in an inch, and 72 points.
_POINTS = 72 / 96


def pdf_of(picture: str) -> bytes:
    """The content of the file, of an SVG; ImportError if the package that draws it is missing."""
    try:
        from typst import compile
    except ImportError:
        raise ImportError("a PDF needs typst: pip install 'schedlang[pdf]'") from None
    width = float(picture.partition('width="')[2].partition('"')[0]) * _POINTS
    inputs = {"picture": picture, "width": f"{width:g}pt"}
    made: bytes = compile(_DOCUMENT, sys_inputs=inputs)
    return made
