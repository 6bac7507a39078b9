"""The tree-sitter grammar, by which Neovim, Helix and others colour and fold programs.

It is made from the grammar of the language: `python -m tools.grammars.tree_sitter FOLDER`.

Words that can be names need no rule there: tree-sitter takes a word for one of the language only
where that one can stand.
"""

from __future__ import annotations

import json
import re
from typing import Any

from attrs import define, field
from lark import Tree
from lark.grammar import NonTerminal, Terminal
from lark.load_grammar import load_grammar

from schedlang.extras.editor.colours import op_words
from schedlang.files.package import GRAMMAR
from schedlang.language.grammar import patterns, spellings, words
from schedlang.language.scopes import BUILTINS

#: A rule, as the document that `tree-sitter generate` reads has it.
Rule = dict[str, Any]

_IDENTIFIER = "identifier"
#: Rules of the language that are not for editors, or are another one here.
_LEFT_OUT = frozenset({"foreign", "word"})


def tree_sitter() -> dict[str, Any]:
    """The grammar, as `src/grammar.json` has it: rules by their names, the first one is a file."""
    return _Generator().document()


@define
class _Generator:
    """Goes through the rules as they are written."""

    rules: dict[str, Any] = field(factory=dict)
    #: Rules that stand for another one alone, or for one of several; nodes leave them out.
    hidden: frozenset[str] = frozenset()
    #: What each alternative with a name of its own is.
    made: dict[str, Rule] = field(factory=dict)

    def document(self) -> dict[str, Any]:
        """The whole grammar."""
        text = GRAMMAR.read_text("utf-8")
        # lark's own reader of grammars: trees of the rules as they are written, not yet taken apart
        # for its parser, where options and repetitions would be rules of their own.
        loaded: Any = load_grammar(text, "sched", [], False)  # type: ignore[no-untyped-call]
        definitions = loaded[0].rule_defs
        self.rules = {str(name): tree for name, _, tree, _ in definitions}
        self.hidden = frozenset(
            str(name) for name, *_, options in definitions if options.expand1
        )
        document = {
            "source_file": _choice(
                [_symbol("schedule"), self.rule(self.rules["items"])]
            )
        }
        for name, tree in self.rules.items():
            if name in _LEFT_OUT or _can_be_empty(self.rules, tree):
                continue
            document[self.name(name)] = self.rule(tree)
            # An alternative that has a name, `-> call`, is a rule of its own there, beside the one
            # that it stands in.
            document |= self.made
            self.made = {}
        document[_IDENTIFIER] = _pattern("NAME")
        document["comment"] = _pattern("COMMENT")
        return {
            "name": "sched",
            "word": _IDENTIFIER,
            "rules": document,
            "extras": [{"type": "PATTERN", "value": "\\s"}, _symbol("comment")],
            "conflicts": [],
            "precedences": [],
            "externals": [],
            "inline": [],
            "supertypes": [],
        }

    def name(self, name: str) -> str:
        """What a rule is called; tree-sitter hides those with a `_`."""
        return f"_{name}" if name in self.hidden else name

    def rule(self, tree: Any) -> Rule:
        """A piece of the grammar."""
        if isinstance(tree, NonTerminal):
            return self.reference(str(tree.name))
        if isinstance(tree, Terminal):
            return self.terminal(str(tree.name))
        match tree:
            case Tree("expansions", alternatives):
                return _choice([self.rule(each) for each in alternatives])
            case Tree("expansion", parts):
                members = [self.rule(part) for part in parts]
                return (
                    members[0]
                    if len(members) == 1
                    else {"type": "SEQ", "members": members}
                )
            case Tree("alias", [expansion, NonTerminal() as name]):
                made = str(name.name)
                self.made[made] = self.rule(expansion)
                return _symbol(made)
            case Tree("maybe", [content]):
                return _choice([self.rule(content), {"type": "BLANK"}])
            case Tree("expr", [content, "*"]):
                return {"type": "REPEAT", "content": self.rule(content)}
            case Tree("value", [value]):
                return self.rule(value)
            case Tree("literal", [str() as text]):
                return {"type": "STRING", "value": json.loads(text)}
        raise ValueError(f"the grammar has something new: {tree}")

    def terminal(self, name: str) -> Rule:
        """A terminal: a text, a pattern that is all of its rule, or one with a rule of its own."""
        if name in spellings():
            return {"type": "STRING", "value": spellings()[name]}
        if name.lower() in self.rules:
            return _pattern(name)
        self.made[name.lower()] = _pattern(name)
        return _symbol(name.lower())

    def reference(self, name: str) -> Rule:
        """A rule where it is used. One that can be empty is written out: tree-sitter has none."""
        if name == "word":
            return _symbol(_IDENTIFIER)
        if _can_be_empty(self.rules, self.rules[name]):
            return self.rule(self.rules[name])
        return _symbol(self.name(name))


def _can_be_empty(rules: dict[str, Any], tree: Any) -> bool:
    """Whether a piece of the grammar can take nothing."""
    if isinstance(tree, NonTerminal):
        name = str(tree.name)
        return name in rules and _can_be_empty_rule(rules, name)
    match tree:
        case Tree("expansions", alternatives):
            return any(_can_be_empty(rules, each) for each in alternatives)
        case Tree("expansion", parts):
            return all(_can_be_empty(rules, part) for part in parts)
        case Tree("value", [value]):
            return _can_be_empty(rules, value)
        case Tree("maybe") | Tree("expr"):
            return True
    return False


def _can_be_empty_rule(rules: dict[str, Any], name: str) -> bool:
    """The same for a rule. Those that call themselves do so behind or before something else."""
    return _can_be_empty({key: rules[key] for key in rules if key != name}, rules[name])


def _symbol(name: str) -> Rule:
    return {"type": "SYMBOL", "name": name}


def _choice(members: list[Rule]) -> Rule:
    return members[0] if len(members) == 1 else {"type": "CHOICE", "members": members}


def _pattern(name: str) -> Rule:
    """A terminal that is a pattern. Tree-sitter's cannot look ahead."""
    return {"type": "PATTERN", "value": re.sub(r"\(\?!.*\)$", "", patterns()[name])}


def javascript(document: dict[str, Any]) -> str:
    """The same in the language that people write such grammars in."""
    lines = [
        "// Made from grammars/sched.lark: python -m tools.grammars.tree_sitter FOLDER",
        "module.exports = grammar({",
        f"  name: {json.dumps(document['name'])},",
        f"  word: ($) => $.{document['word']},",
        f"  extras: ($) => [{', '.join(map(_script, document['extras']))}],",
        "  rules: {",
        *(
            f"    {name}: ($) => {_script(rule)},"
            for name, rule in document["rules"].items()
        ),
        "  },",
        "});",
    ]
    return "\n".join(lines) + "\n"


def _script(rule: Rule) -> str:
    """A piece of the grammar as an expression."""
    match rule:
        case {"type": "SYMBOL", "name": name}:
            return f"$.{name}"
        case {"type": "STRING", "value": text}:
            return json.dumps(text)
        case {"type": "PATTERN", "value": pattern}:
            return f"/{pattern}/"
        case {"type": "BLANK"}:
            return "blank()"
        case {"type": "REPEAT", "content": content}:
            return f"repeat({_script(content)})"
        case {"type": kind, "members": members}:
            return f"{kind.lower()}({', '.join(map(_script, members))})"
    raise ValueError(rule)


def highlights() -> str:
    """The query that colours programs; what stands further down goes before."""
    keywords = sorted(set(words().values()) - op_words())
    signs = {text for text in spellings().values() if not text.isalpha()}
    operators = sorted(signs - set("{}(),"))
    builtins = " ".join(map(json.dumps, BUILTINS))
    return "\n".join(
        [
            "; Made from grammars/sched.lark: python -m tools.grammars.tree_sitter FOLDER",
            "(comment) @comment",
            "(string) @string",
            "(number) @number",
            "(decimal) @number.float",
            "(name) @variable",
            "(reference) @variable",
            "(param (name) @constant)",
            "(fn . (name) @function)",
            "(pipeline . (name) @function)",
            "(call . (name) @function.call)",
            f"((call . (name) @function.builtin) (#any-of? @function.builtin {builtins}))",
            f"[{' '.join(map(json.dumps, keywords))}] @keyword",
            "(for_all) @keyword",
            f"[{' '.join(map(json.dumps, sorted(op_words())))}] @type.builtin",
            f"[{' '.join(map(json.dumps, operators))}] @operator",
            '["{" "}" "(" ")"] @punctuation.bracket',
            '"," @punctuation.delimiter',
            "",
        ]
    )


#: What can be folded.
_FOLDS = "[(schedule) (body) (block) (repeated) (row) (overlap) (exchange)] @fold\n"


def files() -> dict[str, str]:
    """The grammar and its queries, each by its path in the repository."""
    document = tree_sitter()
    made = {
        "grammar.js": javascript(document),
        "src/grammar.json": json.dumps(document, indent=2) + "\n",
        "queries/highlights.scm": highlights(),
        "queries/folds.scm": _FOLDS,
    }
    return {f"editors/tree-sitter-sched/{path}": text for path, text in made.items()}
