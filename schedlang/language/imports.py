"""A program together with the files that it imports."""

from pathlib import Path

from attrs import define, evolve, field

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Label, Source, Span
from schedlang.files.file_kinds import FileKind, kind_of
from schedlang.files.package import GALLERY
from schedlang.files.reading import read_source
from schedlang.language import syntax
from schedlang.language.trees import items_of, tree_of, with_items


def with_imports(
    source: Source, tree: syntax.Schedule
) -> tuple[Source, syntax.Schedule]:
    """The tree of a program with the items of imported files in place, and the source that has the
    texts of all.

    A file is found beside the one that imports it, or else in the gallery. A file that is imported
    already adds nothing. CompileError for a file that is not there, or not a list of items.
    """
    loading = _Loading(source, {Path(source.path).resolve()})
    items = loading.splice(tree.items, Path(source.path).parent)
    return loading.source, with_items(tree, items)


def inlined(source: Source) -> str:
    """The text of a program with those of imported files in place of the imports."""
    loading = _Loading(source, {Path(source.path).resolve()})
    loading.splice(tree_of(source).items, Path(source.path).parent)
    return loading.inlined(0, len(source.text))


def file_of(name: str, folder: Path) -> Path | None:
    """The file that an import in a file of a folder names; None if there is none."""
    candidates = (folder / name, GALLERY / name)
    return next((path for path in candidates if path.is_file()), None)


@define
class _Loading:
    """The source so far, and the files that are in it."""

    source: Source
    files: set[Path] = field(factory=set)
    #: Where imports stand in the texts, and the texts that they name, if they were not there yet.
    places: list[tuple[Span, int, int]] = field(factory=list)

    def inlined(self, begin: int, end: int) -> str:
        """A part of the texts, with others in place of the imports in it."""
        parts = []
        for span, first, last in sorted(self.places, key=lambda place: place[0].start):
            if begin <= span.start < end:
                parts += [
                    self.source.text[begin : span.start],
                    self.inlined(first, last),
                ]
                # It may end in a comment.
                parts.append("\n")
                begin = span.end
        return "".join([*parts, self.source.text[begin:end]])

    def splice(self, items: tuple[syntax.Node, ...], folder: Path) -> list[syntax.Node]:
        """Items of a file in a folder, with those of imported files in place of imports."""
        spliced = []
        for item in items:
            spliced += (
                self.imported(item, folder)
                if isinstance(item, syntax.Import)
                else [item]
            )
        return spliced

    def imported(self, item: syntax.Import, folder: Path) -> list[syntax.Node]:
        """The items of the file that an import names."""
        path = file_of(item.file, folder)
        if path is None:
            help = f"it is looked for in `{folder}`, then in the gallery"
            message = f"there is no file `{item.file}` to import"
            label = Label(item.span)
            raise CompileError(
                [Diagnostic("import", message, (label,), self.source, help=help)]
            )
        if path.resolve() in self.files:
            self.places.append((item.span, 0, 0))
            return []
        self.files.add(path.resolve())
        # All texts are one, so that a span of two numbers is a place in any of the files.
        start = len(self.source.text) + 1
        text = f"{self.source.text}\n{read_source(path).text}"
        self.places.append((item.span, start, len(text)))
        imports = (*self.source.imports, (str(path), start))
        self.source = evolve(self.source, text=text, imports=imports)
        try:
            items = items_of(self.source, start)
        except CompileError:
            kind = kind_of(self.source.text[start:])
            if kind in (FileKind.ITEMS, FileKind.TEXT):
                raise
            message = f"`{item.file}` is {kind.called}, not a list of items"
            help = "a file to import has items alone, such as `let` and `fn`"
            label = Label(item.span)
            raise CompileError(
                [Diagnostic("import", message, (label,), self.source, help=help)]
            ) from None
        return self.splice(items, path.parent)
