"""The TextMate grammar, by which VS Code and others colour programs: made from the grammar of the
language.

Such a grammar knows a line, and no parser. That a word of the language is a name, it tells by what
stands before: operators and words behind which a name can stand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from lark.parsers.lalr_analysis import Shift

from schedlang.extras.editor.colours import Colour, op_words
from schedlang.language.grammar import patterns, reserved, spellings, words
from schedlang.language.recovery import begin
from schedlang.language.scopes import BUILTINS

#: The scope of each colour: names that all themes know.
SCOPES = {
    Colour.COMMENT: "comment.line.number-sign.sched",
    Colour.KEYWORD: "keyword.control.sched",
    Colour.OP: "support.class.op.sched",
    Colour.FUNCTION: "entity.name.function.sched",
    Colour.BUILTIN: "support.function.sched",
    Colour.NAME: "variable.other.sched",
    Colour.NUMBER: "constant.numeric.sched",
    Colour.STRING: "string.quoted.double.sched",
    Colour.OPERATOR: "keyword.operator.sched",
    Colour.PUNCTUATION: "punctuation.sched",
    Colour.FOREIGN: "invalid.illegal.sched",
}
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_CALLED = r"(?=\s*\()"


def textmate() -> dict[str, Any]:
    """The grammar as a document."""
    known = words()
    can_be_names = [known[terminal] for terminal in known.keys() - reserved()]
    name = f"{_any(can_be_names)}\\b"
    behind = _behind()
    operators = [
        text
        for text in spellings().values()
        if not text.isalpha() and text not in "{}(),"
    ]
    return {
        "$schema": "https://raw.githubusercontent.com/martinring/tmlanguage/master/tmlanguage.json",
        "name": "schedlang",
        "scopeName": "source.sched",
        "patterns": [
            _rule(Colour.COMMENT, "#.*$"),
            _rule(Colour.STRING, r'"[^"]*"'),
            # What stands before keeps its own colour.
            *(
                {
                    "match": f"({before})(\\s*)({name}){follows}",
                    "captures": {
                        "1": {"name": SCOPES[colour]},
                        "3": {"name": SCOPES[own]},
                    },
                }
                for colour, before in behind.items()
                for follows, own in ((_CALLED, Colour.FUNCTION), ("", Colour.NAME))
            ),
            _rule(Colour.KEYWORD, f"\\b{patterns()['FOR_ALL']}"),
            _rule(Colour.OP, f"\\b{_any(op_words())}\\b"),
            _rule(Colour.KEYWORD, f"\\b{_any(set(known.values()) - op_words())}\\b"),
            _rule(Colour.NUMBER, r"[0-9]+\.[0-9]+|[0-9]+"),
            _rule(Colour.BUILTIN, f"\\b{_any(BUILTINS)}\\b{_CALLED}"),
            _rule(Colour.FUNCTION, f"\\b{_NAME}{_CALLED}"),
            _rule(Colour.NAME, f"\\b{_NAME}"),
            _rule(Colour.OPERATOR, _any(operators)),
            _rule(Colour.PUNCTUATION, "[{}(),]"),
        ],
    }


def _rule(colour: Colour, pattern: str) -> dict[str, str]:
    return {"match": pattern, "name": SCOPES[colour]}


def _any(texts: Iterable[str]) -> str:
    """A pattern for any of some texts, of which longer ones come first."""
    ordered = sorted(texts, key=lambda text: (-len(text), text))
    return f"(?:{'|'.join(map(re.escape, ordered))})"


def _behind() -> dict[Colour, str]:
    """Patterns of what a name can stand behind, as the tables of the parser have it, by colour."""
    # A state of the parser says what each terminal leads to. A name can stand behind a terminal if
    # the state that it leads to takes a NAME: behind `for`, `=` and `(`, and not behind `}`. Behind
    # `send`, `weights` is no name; it takes a state to tell, which these patterns have not.
    states = begin("items").parse_conf.parse_table.states
    texts = {
        spellings()[terminal]
        for actions in states.values()
        for terminal, (action, target) in actions.items()
        if action is Shift and terminal in spellings() and "NAME" in states[target]
    }
    return {
        Colour.KEYWORD: f"\\b{_any(filter(str.isalpha, texts - op_words()))}\\b",
        Colour.OPERATOR: _any(
            text for text in texts if not text.isalpha() and text not in "(,"
        ),
        Colour.PUNCTUATION: "[(,]",
    }


def files() -> dict[str, str]:
    """The grammar, by its path in the repository."""
    text = json.dumps(textmate(), indent=2) + "\n"
    return {"editors/vscode/syntaxes/sched.tmLanguage.json": text}
