"""A mistake in a layout, as data."""

from attrs import frozen


@frozen
class WrongLayout:
    """A mistake in a field of a layout, or in `microbatches`.

    `item` is the index of the wrong item, or None if no single item is wrong. `code` is that of the
    diagnostic.
    """

    code: str
    field: str
    message: str
    item: int | None = None
    help: str | None = None
