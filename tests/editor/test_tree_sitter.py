"""The tree-sitter grammar: it is that of the language, and takes the programs that the compiler takes.

Tree-sitter makes LR(1) tables of a grammar, and takes a word for one of the language only where that
one can stand. Lark does the same with LALR(1) tables, which are less, and its contextual lexer: so a
grammar without a conflict here has none there.
"""

import json
import random
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedInput

from schedlang.extras.editor.colours import Colour, coloured, op_words
from schedlang.language.grammar import reserved, words
from tests.support.paths import GALLERY, PROGRAMS, ROOT
from tests.support.scattered import scattered
from tests.support.short_programs import short_programs
from tests.support.tree_corpus import cases, parsed, written
from tools.grammars.tree_sitter import tree_sitter

FOLDER = ROOT / "editors" / "tree-sitter-sched"
FILES = [*GALLERY, *sorted((PROGRAMS / "lib").glob("*.sched"))]


@cache
def parser() -> Lark:
    """The grammar as one of Lark."""
    document = tree_sitter()
    rules = document["rules"]
    lines = [
        f"{name}: {_lark(rule)}" for name, rule in rules.items() if name != "comment"
    ]
    lines += ["%ignore /\\s+/", f"%ignore /{rules['comment']['value']}/"]
    return Lark(
        "\n".join(lines),
        parser="lalr",
        lexer="contextual",
        start="source_file",
        keep_all_tokens=True,
        propagate_positions=True,
    )


def _lark(rule: dict[str, Any]) -> str:
    match rule:
        case {"type": "SYMBOL", "name": name}:
            return str(name)
        case {"type": "STRING", "value": text}:
            return json.dumps(text)
        case {"type": "PATTERN", "value": pattern}:
            return f"/{pattern}/"
        case {"type": "REPEAT", "content": content}:
            return f"({_lark(content)})*"
        case {"type": "SEQ", "members": members}:
            return " ".join(map(_lark, members))
        case {"type": "CHOICE", "members": members}:
            some = [_lark(each) for each in members if each["type"] != "BLANK"]
            return f"({' | '.join(some)}){'?' if len(some) < len(members) else ''}"
    raise ValueError(rule)


def colours(tree: Tree[Token], text: str) -> dict[int, Colour]:
    """What the query for colours says of each piece, by its place."""
    found = {}
    for node in tree.iter_subtrees_topdown():
        for child in node.children:
            if not isinstance(child, Token):
                continue
            place = child.start_pos or 0
            if node.data == "identifier":
                found[place] = Colour.NAME
            elif child in op_words():
                found[place] = Colour.OP
            elif child in words().values() or node.data == "for_all":
                found[place] = Colour.KEYWORD
    return found


def check(text: str) -> None:
    names = (Colour.FUNCTION, Colour.BUILTIN)
    wanted = {
        start: Colour.NAME if colour in names else colour
        for start, _, colour in coloured(text)
        if colour in (Colour.NAME, Colour.OP, Colour.KEYWORD, *names)
    }
    assert colours(parser().parse(text), text) == wanted


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_gallery(path: Any) -> None:
    text = path.read_text()
    check(text)
    check(scattered(text, random.Random(path.stem)))


@pytest.mark.slow
def test_short_programs() -> None:
    for number, source in enumerate(short_programs()):
        if number % 5 == 0:
            check(source.text)


def test_every_word_that_can_be_a_name_is_one_where_names_stand() -> None:
    for terminal in sorted(words().keys() - reserved()):
        word = words()[terminal]
        check(
            f"let {word} = {word} + 1 fn f({word}) = {word}({word}) rank {word} {{ F({word}) }}"
        )


def test_two_words_that_are_one() -> None:
    check(
        "assert bubble == 1 for\n  all rank r { assert 1 for all, 'why' for m in 0 .. 1 { U } }".replace(
            "'", '"'
        )
    )


def test_what_is_no_program_is_none() -> None:
    for text in (
        "schedule s {",
        "let = 2",
        "rank r { F(m) ) }",
        "schedule s { } let a = 1",
    ):
        with pytest.raises(UnexpectedInput):
            parser().parse(text)


CORPUS = sorted((FOLDER / "test" / "corpus").glob("*.txt"))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_the_corpus(path: Path, golden: Callable[[str, Path], None]) -> None:
    golden(written(parsed(case, parser()) for case in cases(path)), path)


def test_every_rule_has_a_case() -> None:
    trees = [case.tree for path in CORPUS for case in cases(path)]
    shown = set(re.findall(r"\((\w+)", "".join(trees)))
    assert shown == {
        name for name in tree_sitter()["rules"] if not name.startswith("_")
    }


#: The functions that such a grammar is written with.
SHIM = """
const rule = (each) => typeof each === "string" ? { type: "STRING", value: each }
  : each instanceof RegExp ? { type: "PATTERN", value: each.source } : each;
const listed = (type) => (...members) => ({ type, members: members.map(rule) });
const names = new Proxy({}, { get: (_, name) => ({ type: "SYMBOL", name }) });
Object.assign(globalThis, {
  seq: listed("SEQ"), choice: listed("CHOICE"), blank: () => ({ type: "BLANK" }),
  repeat: (content) => ({ type: "REPEAT", content: rule(content) }),
  grammar: (given) => given,
});
const given = require(process.argv[1]);
const rules = Object.entries(given.rules).map(([name, make]) => [name, rule(make(names))]);
console.log(JSON.stringify({
  name: given.name, word: given.word(names).name, rules: Object.fromEntries(rules),
  extras: given.extras(names).map(rule),
}));
"""


@pytest.mark.editors
def test_the_script_says_the_same() -> None:
    command = ["node", "-e", SHIM, str(FOLDER / "grammar.js")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    written = json.loads((FOLDER / "src" / "grammar.json").read_text())
    assert document == {name: written[name] for name in document}
