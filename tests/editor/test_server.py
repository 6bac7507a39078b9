"""The language server, asked by a client over its standard input and output."""

import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import frozen
from lsprotocol import types
from pygls.exceptions import JsonRpcException

from schedlang import CompileError, Source, compile, read_source, simulate
from schedlang.extras.editor.positions import Lines
from schedlang.language.formatting import rule_of
from tests.support.language_client import Client, Session, at, edited
from tests.support.paths import GALLERY
from tests.support.sizes import shares

pytestmark = pytest.mark.slow

HERE = types.Position(0, 0)
WHOLE = types.Range(HERE, types.Position(10_000, 0))

DEADLOCK = """\
schedule d {
    param ranks = 2
    param microbatches = 2
    rank r {
        for m in 0 .. microbatches {
            recv F(m)  F(m)  recv B(m)  send F(m)  B(m)  send B(m)
        }
    }
}
"""


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """A server for all tests; it ends without an error, as it must not have before."""
    # Whatever else the machine does.
    session = Session(limit=300)
    yield session
    assert session.end() == 0


def configure(client: Client, **settings: object) -> None:
    """Send the settings of an editor."""
    document = {"schedlang": settings}
    client.workspace_did_change_configuration(
        types.DidChangeConfigurationParams(document)
    )


def document(uri: str) -> types.TextDocumentIdentifier:
    return types.TextDocumentIdentifier(uri)


@pytest.mark.parametrize("paths", shares(GALLERY))
def test_every_program_of_the_gallery(session: Session, paths: list[Path]) -> None:
    async def talk(client: Client) -> None:
        for path in paths:
            text = path.read_text()
            uri = client.open(path)
            found = await client.diagnostics(uri)
            assert found == [], path
            plan = compile(read_source(path))
            execution = simulate(plan)
            (lens,) = await client.text_document_code_lens_async(
                types.CodeLensParams(document(uri))
            )
            assert (
                f"makespan {execution.timeline.makespan:.10g}, " in lens.command.title
            )
            assert f"peak {max(execution.peak_memory):.10g} " in lens.command.title
            line = text.splitlines()[lens.range.start.line]
            assert line.startswith("schedule ")
            hints = await client.text_document_inlay_hint_async(
                types.InlayHintParams(document(uri), WHOLE)
            )
            assert len(hints or ()) >= len(re.findall(r"^ {8}let ", text, re.M)), path
            spans = [plan.spans[source].start for source in plan.ranks[0].source]
            # Of a program whose order stands in a file that it imports, the name of that is here.
            place = next((start for start in spans if start < len(text)), None)
            said = "declared in" if place is None else "of the critical path"
            place = text.index("run ") + len("run ") if place is None else place
            question = types.HoverParams(document(uri), Lines(text).position(place))
            hover = await client.text_document_hover_async(question)
            assert said in hover.contents.value, path
            # Before its ranks, a program has costs of ops.
            ranks = max(text.find("\n    rank "), 0)
            called = re.compile(r"(?<!cost )\b[FBI](?=\()").search(text, ranks)
            offset = called.end() if called else 0
            parts = await ask_all(client, uri, text, offset)
            assert parts.outline[0].name == plan.name, path
            assert parts.folds
            assert parts.signature or not called, path
            client.close(uri)

    session(talk)


@frozen
class Parts:
    """What a client was told of a text as a whole, and of a place."""

    outline: list[types.DocumentSymbol]
    folds: list[types.FoldingRange]
    colours: list[int]
    highlights: list[types.DocumentHighlight]
    signature: types.SignatureHelp | None


async def ask_all(client: Client, uri: str, text: str, offset: int) -> Parts:
    """Ask for all that is told of any text, whether it is a program or not, and hold each answer to
    what editors demand of it.
    """
    lines = Lines(text)
    last = lines.position(len(text))
    end = last.line, last.character
    where = document(uri), lines.position(offset)
    of_text = [document(uri)]

    outline = await client.text_document_document_symbol_async(
        types.DocumentSymbolParams(*of_text)
    )
    waiting = [*outline]
    while waiting:
        part = waiting.pop()
        assert part.name
        assert is_within(part.selection_range, part.range)
        assert is_within(part.range, types.Range(HERE, last))
        waiting += part.children or ()
    folds = await client.text_document_folding_range_async(
        types.FoldingRangeParams(*of_text)
    )
    assert all(0 <= each.start_line < each.end_line <= end[0] for each in folds)
    tokens = await client.text_document_semantic_tokens_full_async(
        types.SemanticTokensParams(*of_text)
    )
    assert len(tokens.data) % 5 == 0
    line = column = ends = 0
    for number in range(0, len(tokens.data), 5):
        down, right, length = tokens.data[number : number + 3]
        column = right + (0 if down else column)
        # Pieces come in their order, and none begins before the one before it ends.
        assert down or column >= ends
        line += down
        ends = column + length
        assert (line, ends) <= end
    highlights = await client.text_document_document_highlight_async(
        types.DocumentHighlightParams(*where)
    )
    items = await client.text_document_completion_async(types.CompletionParams(*where))
    assert items is not None
    await ask_of_names(client, uri, text, offset)
    edits = await client.text_document_formatting_async(
        types.DocumentFormattingParams(document(uri), types.FormattingOptions(4, True))
    )
    assert edits is None or [each.range for each in edits] == [types.Range(HERE, last)]
    signature = await client.text_document_signature_help_async(
        types.SignatureHelpParams(document(uri), lines.position(offset + 1))
    )
    return Parts(outline, folds, tokens.data, highlights or [], signature)


async def ask_of_names(client: Client, uri: str, text: str, offset: int) -> None:
    """Ask where the name at a place stands, and what would be written to give it another one: an
    editor may ask so of any place, and is told if it cannot be.
    """
    where = document(uri), Lines(text).position(offset)
    places = await client.text_document_references_async(
        types.ReferenceParams(types.ReferenceContext(True), *where)
    )
    renamed = await client.text_document_prepare_rename_async(
        types.PrepareRenameParams(*where)
    )
    assert bool(places) == (renamed is not None)
    try:
        edit = await client.text_document_rename_async(
            types.RenameParams(
                new_name="another_name", text_document=where[0], position=where[1]
            )
        )
    except JsonRpcException as error:
        said = error
    else:
        assert renamed in [each.range for each in edit.changes[uri]]
        return
    # The server says why it cannot be; it has not failed.
    assert said.code == types.ErrorCodes.InvalidParams


def is_within(inner: types.Range, outer: types.Range) -> bool:
    """Whether a range is in another one."""
    return outer.start <= inner.start <= inner.end <= outer.end


def damaged(rng: random.Random) -> str:
    """A program of the gallery with a few of its words dropped, doubled, exchanged or replaced."""
    words = re.findall(r"\w+|[^\w\s]+|\s+", rng.choice(GALLERY).read_text())
    for _ in range(rng.randint(1, 4)):
        index = rng.randrange(len(words))
        match rng.choice(("drop", "double", "exchange", "other")):
            case "drop":
                words[index] = ""
            case "double":
                words.insert(rng.randrange(len(words)), words[index])
            case "exchange":
                other = rng.randrange(len(words))
                words[index], words[other] = words[other], words[index]
            case "other":
                words[index] = rng.choice(
                    ("{", "}", "(", "0", "next", "r", "W", '"', "\U0001f600")
                )
    return "".join(words)


def mistakes(text: str, path: Path) -> list[str]:
    """What the compiler says is wrong with a text."""
    try:
        compile(Source(str(path), text))
    except CompileError as error:
        return [diagnostic.message for diagnostic in error.diagnostics]
    return []


@pytest.mark.blocks(1)
def test_damaged_programs(block: int, session: Session) -> None:
    """Twenty as one edits them; `make test-editor` tries 200. What is wrong is what the compiler
    says, whatever is asked about any place gets an answer, and figures stand above what is proved.
    """
    path = GALLERY[0].with_name("damaged.sched")
    rng = random.Random(block)

    async def talk(client: Client) -> None:
        uri = client.open(path, GALLERY[0].read_text())
        await client.diagnostics(uri)
        for _ in range(20):
            text = damaged(rng)
            # Without the word it is a file to import, of which the compiler says another thing.
            if rule_of(text) != "schedule":
                continue
            wanted = mistakes(text, path)
            client.write(uri, text)

            def is_of_it(
                found: list[types.Diagnostic], wanted: list[str] = wanted
            ) -> bool:
                errors = [
                    each
                    for each in found
                    if each.severity == types.DiagnosticSeverity.Error
                ]
                return [each.message.split("\n")[0] for each in errors] == wanted

            await client.diagnostics(uri, is_of_it)
            place = Lines(text).position(rng.randrange(len(text)))
            where = document(uri), place
            await client.text_document_hover_async(types.HoverParams(*where))
            await client.text_document_definition_async(types.DefinitionParams(*where))
            await ask_all(client, uri, text, rng.randrange(len(text)))
            context = types.CodeActionContext([])
            await client.text_document_code_action_async(
                types.CodeActionParams(document(uri), WHOLE, context)
            )
            await client.text_document_inlay_hint_async(
                types.InlayHintParams(document(uri), WHOLE)
            )
            # Only a program that is proved has figures above it.
            lenses = await client.text_document_code_lens_async(
                types.CodeLensParams(document(uri))
            )
            assert bool(lenses) == (not wanted), text

    session(talk)


def test_a_repair_is_a_quick_fix(tmp_path: Path, session: Session) -> None:
    async def talk(client: Client) -> None:
        uri = client.open(tmp_path / "d.sched", DEADLOCK)
        (found,) = await client.diagnostics(
            uri, lambda found: "repair: " in found[0].message
        )
        assert found.code == "deadlock"
        assert found.related_information
        context = types.CodeActionContext([found])
        asked = types.CodeActionParams(document(uri), found.range, context)
        (action,) = await client.text_document_code_action_async(asked)
        assert action.kind == "quickfix"
        mended = edited(DEADLOCK, action.edit.changes[uri])
        client.write(uri, mended)
        await client.diagnostics(uri, lambda found: found == [])
        elsewhere = types.CodeActionParams(
            document(uri), types.Range(HERE, HERE), context
        )
        assert not await client.text_document_code_action_async(elsewhere)

    session(talk)


LACKS_BACKWARDS = """\
schedule d {
    param ranks = 4
    param microbatches = 8
    rank r {
        let warmup = ranks - 1 - r
        repeat warmup                { F(next) }
        repeat microbatches - warmup { F(next)  B(next) }
    }
}
"""
ALL_AT_ONCE = """\
schedule d {
    param ranks = 4
    param microbatches = 8
    rank r {
        for m in 0 .. microbatches { F(m) }
        for m in 0 .. microbatches { B(m) }
    }
}
"""
CLAIMS_TOO_MUCH = """\
schedule d {
    param ranks = 4
    param microbatches = 8
    rank r {
        repeat microbatches { F(next) }
        repeat microbatches { B(next) }
        assert peak(r) <= ranks - r and 1 == 1
    }
    assert makespan < 20, "why"
}
"""


@pytest.mark.core
@pytest.mark.parametrize(
    ("text", "fixes"),
    [
        (
            LACKS_BACKWARDS,
            [
                "Add `repeat warmup { B(next) }` behind `repeat microbatches - warmup { … }` (line 7)"
            ],
        ),
        (
            ALL_AT_ONCE.replace("microbatches { B(m) }", "microbatches - 1 { B(m) }"),
            ["Write `microbatches` for `microbatches - 1` in line 6"],
        ),
        (
            ALL_AT_ONCE.replace("microbatches { B(m) }", "microbatches { I(m) }"),
            ["Write whole backwards, `BW` for `I`"],
        ),
        (CLAIMS_TOO_MUCH, ["Write `makespan <= 33`", "Write `peak(r) <= 8`"]),
    ],
)
def test_what_is_wrong_with_a_schedule_has_a_quick_fix(
    tmp_path: Path, session: Session, text: str, fixes: list[str]
) -> None:
    """After it, the program is proved."""

    async def talk(client: Client) -> None:
        uri = client.open(tmp_path / "d.sched", text)

        async def offered() -> list[types.CodeAction]:
            asked = types.CodeActionParams(
                document(uri), WHOLE, types.CodeActionContext([])
            )
            actions = await client.text_document_code_action_async(asked)
            return list(actions or ())

        await client.diagnostics(uri)
        if "missing-op" in {each.code for each in client.published[uri]}:
            await client.diagnostics(uri, lambda found: "repair: " in found[0].message)
        actions = await offered()
        assert sorted(each.title for each in actions) == fixes
        edits = [edit for each in actions for edit in each.edit.changes[uri]]
        client.write(uri, edited(text, edits))
        await client.diagnostics(uri, lambda found: found == [])

    session(talk)


def test_another_spelling_is_a_quick_fix(tmp_path: Path, session: Session) -> None:
    text = GALLERY[0].read_text()
    assert "microbatches - warmup" in text

    async def talk(client: Client) -> None:
        uri = client.open(tmp_path / "s.sched", text)
        assert await client.diagnostics(uri) == []
        for wrong in (
            text.replace("microbatches - warmup", "microbatchs - warmup"),
            text.replace("rank r {", "rnak r {"),
        ):
            client.write(uri, wrong)
            (found,) = await client.diagnostics(uri, lambda found: len(found) == 1)
            context = types.CodeActionContext([found])
            asked = types.CodeActionParams(document(uri), found.range, context)
            (action,) = await client.text_document_code_action_async(asked)
            assert action.title in ("Write `microbatches`", "Write `rank`")
            assert edited(wrong, action.edit.changes[uri]) == text

    session(talk)


def test_what_another_file_lacks_has_no_quick_fix(
    tmp_path: Path, session: Session
) -> None:
    """Its text is not the one that is edited."""
    (tmp_path / "lib.sched").write_text("fn twice(number) = 2 * numbr\n")
    text = GALLERY[0].read_text().replace("{\n", '{\n    import "lib.sched"\n', 1)

    async def talk(client: Client) -> None:
        uri = client.open(tmp_path / "s.sched", text)
        (found,) = await client.diagnostics(uri)
        assert "there is `number`" in found.message
        context = types.CodeActionContext([found])
        asked = types.CodeActionParams(document(uri), found.range, context)
        assert not await client.text_document_code_action_async(asked)

    session(talk)


def test_names_are_found_also_in_imported_files(
    tmp_path: Path, session: Session
) -> None:
    lib = tmp_path / "lib.sched"
    lib.write_text("# more\nfn twice(x) = 2 * x\n")
    text = (
        'schedule s {\n    param ranks = 2\n    param microbatches = 2\n    import "lib.sched"\n'
        "    let all = twice(microbatches) / 2\n    rank r {\n"
        "        for m in 0 .. all { F(m) }\n        for m in 0 .. all { B(m) }\n    }\n}\n"
    )

    async def talk(client: Client) -> None:
        uri = client.open(tmp_path / "s.sched", text)
        assert await client.diagnostics(uri) == []
        asked = types.DefinitionParams(**at(uri, text, "twice"))
        place = await client.text_document_definition_async(asked)
        assert (place.uri, place.range.start) == (lib.as_uri(), types.Position(1, 3))
        asked = types.DefinitionParams(**at(uri, text, "lib.sched"))
        place = await client.text_document_definition_async(asked)
        assert (place.uri, place.range.start) == (lib.as_uri(), HERE)
        context = types.ReferenceContext(include_declaration=True)
        uses = await client.text_document_references_async(
            types.ReferenceParams(context=context, **at(uri, text, "all {"))
        )
        assert [use.range.start.line for use in uses] == [4, 6, 7]
        with pytest.raises(JsonRpcException, match="which other programs may import"):
            await client.text_document_rename_async(
                types.RenameParams(new_name="double", **at(uri, text, "twice"))
            )
        # What is wrong in the other file is shown at its import.
        lib.write_text("fn twice(x) = 2 *\n")
        client.write(uri, text + "\n")
        (found,) = await client.diagnostics(uri)
        assert (found.range.start.line, found.code) == (3, "syntax")
        assert found.related_information[0].location.uri == lib.as_uri()

    session(talk)


def test_renaming_keeps_the_plan(tmp_path: Path, session: Session) -> None:
    path = next(path for path in GALLERY if path.stem == "bitpipe")
    text = path.read_text()

    async def talk(client: Client) -> None:
        uri = client.open(tmp_path / "s.sched", text)
        await client.diagnostics(uri)
        place = at(uri, text, "let a", 4)
        asked = await client.text_document_prepare_rename_async(
            types.PrepareRenameParams(**place)
        )
        assert asked.end.character - asked.start.character == 1
        edit = await client.text_document_rename_async(
            types.RenameParams(new_name="dist", **place)
        )
        new = edited(text, edit.changes[uri])
        assert new.count("dist") == len(edit.changes[uri]) > 8
        before, after = (
            compile(Source("s.sched", each)).to_json() for each in (text, new)
        )
        assert before["actions"] == after["actions"]
        for name in ("h", "repeat", "min", "2x", "a b", "peak"):
            with pytest.raises(JsonRpcException):
                await client.text_document_rename_async(
                    types.RenameParams(new_name=name, **place)
                )

    session(talk)


def test_formatting(tmp_path: Path, session: Session) -> None:
    async def talk(client: Client) -> None:
        written = "schedule s{param ranks=2 # all\n}"
        uri = client.open(tmp_path / "s.sched", written)
        asked = types.DocumentFormattingParams(
            document(uri), types.FormattingOptions(4, True)
        )
        edits = await client.text_document_formatting_async(asked)
        assert edited(written, edits) == "schedule s {\n    param ranks = 2  # all\n}\n"
        client.write(uri, "schedule s {")
        assert await client.text_document_formatting_async(asked) is None

    session(talk)


def test_a_program_that_takes_long_is_stopped(tmp_path: Path, session: Session) -> None:
    """And the server answers meanwhile, and behind it."""
    text = GALLERY[0].read_text()
    large = text.replace("ranks = 4", "ranks = 256").replace(
        "batches = 8", "batches = 16384"
    )

    async def talk(client: Client) -> None:
        configure(client, limit=4)
        uri = client.open(tmp_path / "s.sched", large)
        (found,) = await client.diagnostics(uri)
        assert found.code == "too-many-ops"
        assert "longer than 4 s to compile: stopped" in found.message
        question = types.HoverParams(**at(uri, large, "warmup ="))
        hover = await client.text_document_hover_async(question)
        assert "let warmup = min(ranks - 1 - r, microbatches)" in hover.contents.value
        configure(client, limit=300)
        client.write(uri, text)
        await client.diagnostics(uri, lambda found: found == [])

    session(talk)


def test_only_the_newest_text_is_told(tmp_path: Path, session: Session) -> None:
    text = GALLERY[0].read_text()

    async def talk(client: Client) -> None:
        uri = client.open(tmp_path / "s.sched", text)
        await client.diagnostics(uri)
        before = client.times[uri]
        for end in range(0, len(text), 50):
            client.write(uri, text[:end])
            await asyncio.sleep(0.01)
        client.write(uri, text.replace("(m)", "(n)"))
        found = await client.diagnostics(uri, lambda found: len(found) > 1)
        assert {each.code for each in found} == {"unknown-name"}
        assert client.times[uri] - before < len(text) / 50 / 2

    session(talk)


def test_figures_are_of_the_text_that_stands_below_them(tmp_path: Path) -> None:
    """From a key on they are not known, until all is known of this text; a broken one has none."""
    text = GALLERY[0].read_text()

    async def talk(client: Client) -> None:
        uri = client.open(tmp_path / "s.sched", text)
        asked = types.CodeLensParams(document(uri))

        async def titles() -> list[str]:
            lenses = await client.text_document_code_lens_async(asked)
            return [lens.command.title for lens in lenses]

        async def settled() -> list[str]:
            before = client.refreshes
            while (found := await titles()) == ["checking …"]:
                await client.refreshed(before)
                before = client.refreshes
            return found

        (known,) = await settled()
        assert known.startswith("makespan ")
        for broken in (text.replace("(m)", "(n)"), DEADLOCK):
            before = client.refreshes
            client.write(uri, broken)
            await client.refreshed(before)
            assert await titles() == ["checking …"]
            assert await settled() == []
        before = client.refreshes
        client.write(uri, text)
        await client.refreshed(before)
        assert await settled() == [known]

    session = Session(asks_again=True, limit=300)
    session(talk)
    assert session.end() == 0


def test_parameters_of_the_editor(tmp_path: Path, session: Session) -> None:
    text = GALLERY[0].read_text()

    async def talk(client: Client) -> None:
        configure(client, params={"ranks": 8, "other": 3}, viewCommand="view.it")
        uri = client.open(tmp_path / "s.sched", text)
        await client.diagnostics(uri)
        asked = types.CodeLensParams(document(uri))
        (lens,) = await client.text_document_code_lens_async(asked)
        assert "(ranks = 8, microbatches = 8)" in lens.command.title
        assert lens.command.command == "view.it"
        configure(client, params={"ranks": 2})
        await client.diagnostics(uri)
        (lens,) = await client.text_document_code_lens_async(asked)
        assert "(ranks = 2, microbatches = 8)" in lens.command.title
        configure(client, params={}, viewCommand="")

    session(talk)
