"""All syntax errors of a text.

The parser stops at the first place where a text is no program. Here the text is mended there, with
as small a change as lets the parser go on, and parsed further; what cannot be mended is skipped up
to the next statement. The change is also what the help offers. Nothing is made of the mended text.
"""

import re
from collections.abc import Hashable, Iterator, Sequence
from copy import copy
from itertools import product
from typing import Any

from attrs import define, evolve, field, frozen
from lark import Token
from lark.exceptions import UnexpectedToken
from lark.parsers.lalr_parser_state import ParserState

from schedlang.diagnostics.diagnostic import Diagnostic, counted
from schedlang.diagnostics.repair import Edit, Hint, Repair, another_word
from schedlang.diagnostics.source import Label, Source, Span
from schedlang.language.grammar import (
    END,
    FORMS,
    grammar,
    reserved,
    spellings,
    tokens_of,
    words,
)
from schedlang.language.habits import FORMER, HABITS, Habit
from schedlang.schedule.kinds import OPS

#: The parser between two tokens.
Parser = ParserState[Any]

_SHOWN = {
    "NAME": "a name",
    "NUMBER": "a number",
    "DECIMAL": "a decimal number",
    "STRING": "a text in quotes",
    "FOR_ALL": "`for all`",
    END: "the end of the file",
}
_MOST_EXPECTED = 7
#: The most mistakes that are looked for: who has more has another kind of file.
_MOST = 20
#: A change is right where so many more tokens are a program behind it.
_ENOUGH = 6
#: How far a change is followed, to find the one that leads furthest.
_FAR = 24
#: How many tokens before the place of an error may be what is wrong.
_BACK = 3
#: For how many tokens before an error the state of the parser is kept; and how many may be skipped.
_KEPT = 80
_MOST_SKIPPED = 2000
#: The most places that are told of one habit.
_MOST_PLACES = 10
#: In place of the head of a block that is none, so that what stands in the block is looked at: of a
#: statement, a rank, a building block, and the rows of one.
_HEADS = ("if 0", "rank r", "block m every 0", "stage s in 0 .. 0", "schedule s")


def syntax_errors(source: Source, rule: str, start: int) -> list[Diagnostic]:
    """The mistakes of a text that a rule of the grammar does not accept; never empty. The text
    starts at a place of the source.
    """
    recovery = _Recovery(source, start, _tokens(source.text[start:]), begin(rule))
    recovery.run()
    return list(recovery.diagnostics())


def with_forms_of_today(source: Source, rule: str) -> Source:
    """A text with the forms that the language had before rewritten; as it is if it has other
    mistakes.
    """
    recovery = _Recovery(source, 0, _tokens(source.text), begin(rule))
    recovery.run()
    if any(mistake.kind not in FORMER for mistake in recovery.mistakes):
        return source
    edits = tuple(edit for mistake in recovery.mistakes for edit in mistake.edits)
    return Repair("", edits).apply(source)


def mended_tokens(source: Source, rule: str, start: int) -> list[Token]:
    """The tokens of a text with mistakes, changed so that the rule accepts them: small changes as
    for the messages, without what was skipped, and with open blocks closed. Empty if that fails.
    """
    tokens = _tokens(source.text[start:])
    recovery = _Recovery(source, start, tokens, begin(rule), stops_at_braces=False)
    recovery.run()
    read = _tokens_in(_closed(recovery.before_refused(), _end(tokens[-1])))
    return [_located(token, recovery.text) for token in read]


def _tokens(text: str) -> list[Token]:
    """The tokens of a text, and one for its end."""
    end = len(text.rstrip())
    return [*tokens_of(text), Token(END, "", start_pos=end, end_pos=end)]


def begin(rule: str) -> Parser:
    """A parser before the first token. It makes no tree."""
    state: Parser = grammar().parse_interactive("", start=rule).parser_state
    state.parse_conf = copy(state.parse_conf)
    state.parse_conf.callbacks = {}
    return state


def _fork(state: Parser) -> Parser:
    return state.copy(deepcopy_values=False)


def _takes(state: Parser, token: Token) -> bool:
    """Whether the parser takes a token, which changes its state."""
    try:
        state.feed_token(token, token.type == END)
    except UnexpectedToken:
        return False
    return True


def accepted_by(state: Parser) -> frozenset[str]:
    """The terminals that the parser would take next."""
    candidates = state.parse_conf.parse_table.states[state.position]
    return frozenset(
        name for name in candidates if name.isupper() and accepts(state, name)
    )


def accepts(state: Parser, name: str) -> bool:
    """Whether the parser would take a terminal next."""
    return _takes(_fork(state), Token(name, ""))


def _reach(state: Parser, tokens: Sequence[Token]) -> int:
    """How many of some tokens the parser accepts; one more than there are, if it accepts the end of
    the text too.
    """
    state = _fork(state)
    for number, token in enumerate(tokens):
        if not _takes(state, token):
            return number
        if token.type == END:
            return number + _FAR
    return len(tokens)


@frozen
class _Change:
    """Tokens to put in place of the tokens `begin` up to `end`, and how many tokens the parser
    accepts behind them.
    """

    begin: int
    end: int
    tokens: tuple[Token, ...]
    taken: int

    @property
    def reach(self) -> int:
        """The number of the token up to which the parser accepts the text after the change."""
        return self.end + self.taken


@frozen
class _Advice:
    """The help for a mistake, and the change after which the parser goes on, if there is one.
    Mistakes of one `kind` are reported once. `edits` change the text accordingly.
    """

    help: str | None
    change: _Change | None = None
    place: Span | None = None
    kind: Hashable = None
    #: The text that the change rewrites.
    text: Span | None = None
    edits: tuple[Edit, ...] = ()


@frozen
class _Mistake:
    """What is wrong at a place of the text."""

    message: str
    label: Label
    help: str | None
    kind: Hashable
    is_about_braces: bool
    edits: tuple[Edit, ...] = ()
    more: tuple[Label, ...] = ()


@define
class _Recovery:
    """The tokens, changed so far, and the parser before the token `at`."""

    source: Source
    start: int
    tokens: list[Token]
    state: Parser
    at: int = 0
    #: Whether a message about braces is the last one.
    stops_at_braces: bool = True
    mistakes: list[_Mistake] = field(factory=list)
    _states: dict[int, Parser] = field(factory=dict)
    #: What was rewritten; the text stays as it was.
    _rewritten: list[Span] = field(factory=list)
    _has_skipped: bool = False
    #: The line of the last mistake, where it is not certain how it is mended.
    _doubtful_line: int = 0

    @property
    def text(self) -> str:
        """The text that is parsed."""
        return self.source.text[self.start :]

    def run(self) -> None:
        """Find the mistakes, from the first to the last."""
        while len(self.mistakes) < _MOST and not self.advance():
            habit = self.habit()
            nearby = self.nearby(any_word=habit is None)
            # What reads like a habit may be another mistake, which a small change mends for good.
            advice = nearby
            if habit and (self.is_right(habit.change) or nearby.change is None):
                advice = habit
            if advice.text:
                self._rewritten.append(advice.text)
            self.note(advice)
            change = advice.change
            about_braces = change is None or self.is_about_braces(change)
            if change:
                self.apply(change)
            elif not self.skip():
                return
            if about_braces and _excess(self.tokens) and self.stops_at_braces:
                # Braces that do not match make a mistake of what follows, and one is enough.
                return

    def is_right(self, change: _Change | None) -> bool:
        """Whether the parser goes on far enough after a change to take it as the one that was
        meant. Advice without a change is about a word that no program has.
        """
        return change is None or change.reach >= self.at + _ENOUGH

    def advance(self) -> bool:
        """Go on to the first token that the parser refuses. Returns whether there is none."""
        # The parser's states of the last tokens are kept: a change may begin before the place where
        # it stopped.
        for number in range(self.at, len(self.tokens)):
            self.at = number
            self._states[number] = _fork(self.state)
            self._states.pop(number - _KEPT, None)
            if not _takes(self.state, self.tokens[number]):
                self.state = self._states[number]
                return False
        return True

    def before_refused(self) -> Parser:
        """The parser before the token that it has come to, which may be the end of the text."""
        return self._states.get(self.at, self.state)

    def apply(self, change: _Change) -> None:
        """Apply a change, and go back to the place before it."""
        self.tokens[change.begin : change.end] = change.tokens
        self.at = change.begin
        self.state = _fork(self._states[change.begin])
        if any(token.type == "LBRACE" for token in change.tokens):
            self.close_block(change.begin, change.begin + len(change.tokens))

    def is_about_braces(self, change: _Change) -> bool:
        """Whether a change adds or removes braces."""
        tokens = (*change.tokens, *self.tokens[change.begin : change.end])
        return any(token.type in ("LBRACE", "RBRACE") for token in tokens)

    def close_block(self, opened: int, number: int) -> None:
        """Close a block that a change has opened, where its indentation ends, unless the text
        closes it.
        """
        if _excess(self.tokens) <= 0:
            return
        indent = _indent(self.line_of(_start(self.tokens[opened])))
        while self.tokens[number].type != END:
            token = self.tokens[number]
            if self.is_first(token) and self.column(token) <= indent:
                break
            number += 1
        place = _start(self.tokens[number])
        self.tokens.insert(number, _sample("RBRACE", place))

    # Places in the text

    def line_of(self, place: int) -> str:
        """The line that a place of the text is in."""
        begin = self.text.rfind("\n", 0, place) + 1
        return self.text[begin:].partition("\n")[0]

    def column(self, token: Token) -> int:
        """How many characters stand before a token in its line."""
        place = _start(token)
        return place - (self.text.rfind("\n", 0, place) + 1)

    def is_first(self, token: Token) -> bool:
        """Whether a token is the first one of its line."""
        return _indent(self.line_of(_start(token))) == self.column(token)

    # Changes

    def change(self, begin: int, end: int, *tokens: Token) -> _Change:
        """A change, with how far the parser gets after it."""
        behind = self.tokens[end : self.at + _FAR]
        taken = _reach(self._states[begin], [*tokens, *behind]) - len(tokens)
        excess = _excess(self.tokens)
        change = _Change(begin, end, tokens, taken)
        if abs(excess + self.opens(change)) > abs(excess):
            # It is not the braces that are wrong.
            change = evolve(change, taken=min(taken, 0))
        return change

    def habit(self) -> _Advice | None:
        """The advice for a habit from another language that stands here."""
        token = self.tokens[self.at]
        before = _end(self.tokens[self.at - 1]) if self.at else 0
        begin = self.text.rfind("\n", 0, before) + 1
        end = self.text.find("\n", _end(token))
        window = self.text[: end if end >= 0 else len(self.text)]
        best: _Advice | None = None
        for habit in HABITS:
            for match in re.compile(habit.pattern).finditer(window, begin):
                is_here = match.start() <= _start(token) <= match.end()
                if not is_here and match.end() != before:
                    continue
                if any(
                    match.start() < text.end and text.start < match.end()
                    for text in self._rewritten
                ):
                    continue
                advice = self.rewritten(habit, match)
                if advice is None:
                    continue
                if best is None or _leads_further(advice, best):
                    best = advice
        return best

    def rewritten(self, habit: Habit, match: re.Match[str]) -> _Advice | None:
        """The advice for a habit, if the parser gets further after its change."""
        named = "at" if "at" in match.re.groupindex else 0
        place = Span(*match.span(named))
        if habit.write is None:
            is_here = match.start() == _start(self.tokens[self.at])
            return _Advice(habit.help, None, place, habit) if is_here else None
        text = match.expand(habit.write)
        numbers = [
            number
            for number in self._states
            if match.start() <= _start(self.tokens[number]) < match.end()
            # What a change has put there is not in the text.
            and _end(self.tokens[number]) > _start(self.tokens[number])
        ]
        begin = min(numbers, default=self.at)
        end = begin
        while _start(self.tokens[end]) < match.end() and self.tokens[end].type != END:
            end += 1
        tokens = [
            Token(token.type, str(token), start_pos=match.start(), end_pos=match.end())
            for token in tokens_of(text)
        ]
        change = self.change(begin, end, *tokens)
        if change.taken < 0 or (change.reach <= self.at and end < self.at):
            return None
        whole = Span(*match.span())
        # Where the help is not the text itself, more has to be thought of than to write that.
        edits = (Edit(whole, text),) if "{}" in habit.help else ()
        help = habit.help.replace("{}", text.strip())
        return _Advice(help, change, place, habit, whole, edits)

    def nearby(self, any_word: bool) -> _Advice:
        """A change of one token here, or just before, after which the parser goes on.

        If nothing better is known, it may insert any word where many are possible. That is hardly
        the word that was meant, but what follows can be read.
        """
        token = self.tokens[self.at]
        accepted = accepted_by(self.state)
        nothing = _Advice(None, _Change(self.at, self.at, (), 0))
        # The first of the best ones: they come in the order of how likely they are.
        best = max([nothing, *self.single_changes(accepted, any_word)], key=self.worth)
        change = best.change if self.is_right(best.change) else None
        if best.help and change:
            return best
        help, kind = self.elsewhere(token)
        if help and not _excess(self.tokens):
            change = None
        help = help or self.form()
        hint = Hint(help) if help else self.told(change)
        text, edits = (hint.text, hint.edits) if hint else (None, ())
        return _Advice(text, change, kind=kind, edits=edits)

    def told(self, change: _Change | None) -> Hint | None:
        """The advice for the token here, from a change or from the token itself."""
        token = self.tokens[self.at]
        if token.type in FORMS:
            return Hint(f"`{token}` stands as in `{FORMS[token.type]}`")
        is_here = change and change.begin == self.at
        if not change or not is_here or token.type == END or self.expected():
            return None
        if not change.tokens:
            return Hint("leave it out", (Edit(_span(token), ""),))
        missing = spellings().get(change.tokens[0].type, "")
        if change.end == change.begin and missing in (",", "(", ")"):
            behind = _end(self.tokens[self.at - 1])
            return Hint(
                f"`{missing}` may be missing before it",
                (Edit(Span(behind, behind), missing),),
            )
        return None

    def worth(self, advice: _Advice) -> tuple[int, int]:
        """The worth of advice: how far the parser gets, and then whether braces match better."""
        assert advice.change
        excess = _excess(self.tokens)
        return advice.change.reach, abs(excess) - abs(
            excess + self.opens(advice.change)
        )

    def opens(self, change: _Change) -> int:
        """How many more braces open after a change."""
        return _excess(change.tokens) - _excess(self.tokens[change.begin : change.end])

    def single_changes(
        self, accepted: frozenset[str], any_word: bool
    ) -> Iterator[_Advice]:
        """Changes of one token. Of changes that lead equally far, likelier ones come first."""
        at = self.at
        token = self.tokens[at]
        if token.type in reserved() and "NAME" in accepted:
            help = f"{_meaning(token)}; choose another name"
            yield _Advice(help, self.change(at, at + 1, _sample("NAME", _start(token))))
        for name in _near(token, accepted):
            hint = another_word(words()[name], _span(token))
            change = self.change(at, at + 1, _sample(name, _start(token)))
            yield _Advice(hint.text, change, edits=hint.edits)
        for number in range(at, at - min(_BACK, at) - 1, -1):
            yield from self.changes_at(number, any_word)

    def changes_at(self, number: int, any_word: bool) -> Iterator[_Advice]:
        """Changes at a token: insert joining or closing tokens before it, leave it out, insert
        another token before it, or replace it.
        """
        names = sorted(accepted_by(self._states[number]) - {END})
        if not any_word and len(words().keys() & names) > _MOST_EXPECTED:
            names = [name for name in names if name not in words()]
        place = _start(self.tokens[number])
        joins = [name for name in names if name in spellings() and name not in words()]
        others = [name for name in names if name not in joins]
        is_end = self.tokens[number].type == END
        for name in joins:
            yield _Advice(None, self.change(number, number, _sample(name, place)))
        if not is_end:
            yield _Advice(None, self.change(number, number + 1))
        for name in others:
            yield _Advice(None, self.change(number, number, _sample(name, place)))
        if not is_end:
            for name in names:
                yield _Advice(
                    None, self.change(number, number + 1, _sample(name, place))
                )

    def elsewhere(self, token: Token) -> tuple[str | None, Hashable]:
        """A help for a token that begins a part of a program and stands at a wrong place."""
        if token.type not in words():
            return None, None
        in_schedule = _fork(begin("schedule"))
        for name in ("SCHEDULE", "NAME", "LBRACE"):
            _takes(in_schedule, _sample(name))
        in_rank = _fork(in_schedule)
        for name in ("RANK", "NAME", "LBRACE"):
            _takes(in_rank, _sample(name))
        is_item = _takes(in_schedule, token)
        is_statement = _takes(in_rank, token)
        accepted = accepted_by(self.state)
        if is_statement and not is_item and "PARAM" in accepted:
            return (
                "ops and loops stand in `rank r { … }`, which says what every rank does",
                "rank",
            )
        if is_item and not is_statement and "FOR" in accepted:
            return (
                f"`{token}` stands in the schedule itself, outside of its `rank`",
                "schedule",
            )
        return None, None

    def form(self) -> str | None:
        """The form of the item in which the parser stopped, as a help."""
        accepted = accepted_by(self.state)
        if accepted == {"SCHEDULE"}:
            return f"write it as in `{FORMS['SCHEDULE']}`"
        if accepted == {END}:
            return "a file is one schedule, and that is closed before this"
        # The parser's stack has the tokens of what is not finished, the innermost last.
        for part in reversed(self.stuck().value_stack):
            if isinstance(part, Token) and FORMS.get(part.type, "").startswith(part):
                return f"write it as in `{FORMS[part.type]}`"
            if part in ("{", "("):
                break
        return None

    def stuck(self) -> Parser:
        """The parser after it has tried the token here: the reductions that it made remain."""
        state = _fork(self.state)
        _takes(state, self.tokens[self.at])
        return state

    def skip(self) -> bool:
        """Skip to the next statement. Returns whether there is one."""
        self._has_skipped = True
        last = min(self.at + _MOST_SKIPPED, len(self.tokens))
        blocks = _open_blocks(self.state)
        # Where braces match, what follows is in the innermost block until a brace closes it.
        if not _excess(self.tokens):
            del blocks[1:]
        heads = [tuple(tokens_of(head)) for head in _HEADS]
        depth = 0
        for number in range(self.at, last):
            behind = self.tokens[number : number + _ENOUGH]
            # A block is looked at also where its head is none.
            starts = heads if behind[0].type == "LBRACE" else [()]
            for block, start in product(blocks, starts) if depth == 0 else ():
                if _reach(block, [*start, *behind]) >= len(start) + len(behind):
                    self.resume(block, start, number)
                    return True
            depth = max(depth + _excess(behind[:1]), 0)
        return False

    def resume(self, block: Parser, head: Sequence[Token], number: int) -> None:
        """Go on within a block at a token, as if its head stood in the text."""
        self.state = _fork(block)
        place = _start(self.tokens[number])
        for token in head:
            kind, text = token.type, str(token)
            _takes(self.state, Token(kind, text, start_pos=place, end_pos=place))
        self.at = number
        # What stands before is not looked at again.
        self._states.clear()

    # Messages

    def note(self, advice: _Advice) -> None:
        """Record a mistake, unless it follows from what was skipped."""
        token = self.tokens[self.at]
        is_end = accepted_by(self.state) == {END}
        is_brace = token.type == END or (token.type == "RBRACE" and is_end)
        if is_brace and self._has_skipped and not _excess(self.tokens):
            return
        line = self.source.position(self.start + _start(token))[0]
        # One mistake in a line, where it is not sure that the first was mended as it was meant.
        if line == self._doubtful_line and not advice.kind:
            return
        self._doubtful_line = 0 if advice.help else line
        place = advice.place or _span(token)
        edits = tuple(edit.moved(self.start) for edit in advice.edits)
        label = Label(Span(self.start + place.start, self.start + place.end))
        message = self.message(token, place)
        if advice.kind:
            for number, mistake in enumerate(self.mistakes):
                if mistake.kind == advice.kind:
                    self.mistakes[number] = evolve(
                        mistake,
                        more=(*mistake.more, label),
                        edits=mistake.edits + edits,
                    )
                    return
        is_brace |= is_end or advice.kind in ("rank", "schedule")
        self.mistakes.append(
            _Mistake(message, label, advice.help, advice.kind, is_brace, edits)
        )

    def message(self, token: Token, place: Span) -> str:
        """The message for a token that the parser does not accept."""
        text = self.text[place.start : place.end]
        if token.type == END:
            is_empty = len(self.tokens) == 1
            message = (
                "the program is empty" if is_empty else "unexpected end of the file"
            )
        elif token.type == "FOREIGN" and len(text) == 1:
            message = f"unexpected character `{text}`"
        else:
            message = f"unexpected `{text}`"
        expected = self.expected()
        return f"{message}, expected {expected}" if expected else message

    def expected(self) -> str:
        """A help that lists what may stand here; None if that is too much to read."""
        accepted = accepted_by(self.stuck())
        # Words that can be names as well are not worth telling where a name is expected.
        if "NAME" in accepted:
            accepted -= words().keys() - reserved()
        # It may stand behind any claim, and is never what is missing there.
        accepted -= {"FOR_ALL"}
        shown = sorted(
            _SHOWN.get(name) or f"`{spellings()[name]}`" for name in accepted
        )
        if len(shown) > _MOST_EXPECTED:
            # At the end of the file, the one thing that is surely missing.
            is_end = self.tokens[self.at].type == END
            shown = ["`}`"] if is_end and "`}`" in shown else []
        return " or ".join(shown)

    def diagnostics(self) -> Iterator[Diagnostic]:
        """The diagnostics. A habit is reported once, with its other places."""
        brace = self.doubtful_brace()
        for mistake in self.mistakes:
            notes = (_more(self.source, mistake.more),) if mistake.more else ()
            labels: tuple[Label, ...] = (mistake.label,)
            if mistake.is_about_braces and brace:
                # One brace is one mistake, wherever it is met.
                labels += (brace,)
                mistake = evolve(mistake, help=None, edits=())
                brace = None
            yield Diagnostic(
                "syntax",
                mistake.message,
                labels,
                self.source,
                notes,
                mistake.help,
                edits=mistake.edits,
            )

    def doubtful_brace(self) -> Label | None:
        """The surplus brace, or the one that lacks its partner, judged by indentation."""
        tokens = _tokens(self.text)
        excess = _excess(tokens)
        opened: list[Token] = []
        for token in tokens:
            if token.type == "LBRACE":
                opened.append(token)
            if token.type != "RBRACE" or not opened:
                continue
            opener = opened.pop()
            indent = _indent(self.line_of(_start(opener)))
            if self.is_first(token) and excess > 0 and self.column(token) < indent:
                return self.label(opener, "this one seems to be open still")
            if self.is_first(token) and excess < 0 and self.column(token) > indent:
                return self.label(token, "this one seems to be too many")
        return None

    def label(self, token: Token, text: str = "") -> Label:
        """A token of the text as a place of the source."""
        return Label(Span(self.start + _start(token), self.start + _end(token)), text)


def _more(source: Source, labels: tuple[Label, ...]) -> str:
    """A note about other places with the same mistake."""
    shown = labels[:_MOST_PLACES]
    lines = dict.fromkeys(source.position(label.span.start)[0] for label in shown)
    rest = len(labels) - len(shown)
    more = f", and in {counted(rest, 'more place')}" if rest else ""
    return f"the same again in line {', '.join(map(str, lines))}{more}"


def _leads_further(advice: _Advice, best: _Advice) -> bool:
    if advice.change is None or best.change is None:
        return best.change is None and advice.change is not None
    return min(advice.change.taken, _ENOUGH) > min(best.change.taken, _ENOUGH)


def _start(token: Token) -> int:
    """Where a token starts in the text."""
    assert token.start_pos is not None
    return token.start_pos


def _end(token: Token) -> int:
    """Where a token ends in the text."""
    assert token.end_pos is not None
    return token.end_pos


def _span(token: Token) -> Span:
    """Where a token is in the text."""
    return Span(_start(token), _end(token))


def _excess(tokens: Sequence[Token]) -> int:
    """How many more braces open than close."""
    kinds = [token.type for token in tokens]
    return kinds.count("LBRACE") - kinds.count("RBRACE")


def _sample(name: str, place: int = 0) -> Token:
    """A token of a terminal that does not stand in the text."""
    return Token(name, spellings().get(name, ""), start_pos=place, end_pos=place)


def _near(token: Token, accepted: frozenset[str]) -> Iterator[str]:
    """The accepted terminals whose words are similar to a token."""
    from difflib import get_close_matches

    known = {text: name for name, text in words().items() if name in accepted}
    for text, name in known.items():
        if text.lower() == token.lower():
            yield name
    for text in get_close_matches(token.lower(), known, n=2):
        yield known[text]


def _meaning(token: Token) -> str:
    """What a word of the language means, for a user who takes it as a name."""
    ops = {op.word: op.name for op in OPS.values()}
    if token in ops:
        return f"`{token}` is an op of the language, {_article(ops[token])}"
    if token.type in FORMS:
        return f"`{token}` is a word of the language, as in `{FORMS[token.type]}`"
    return f"`{token}` is an op of the language, a whole backward"


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeio" else f"a {noun}"


def _settled(state: Parser) -> Parser:
    """The parser after the reductions that it makes before the next token, whatever that is."""
    settled = state
    # What is complete is reduced when the next token comes, and which one that is hardly matters:
    # the smallest stack has all of it reduced.
    for name in sorted(accepted_by(state) - {END}):
        after = _fork(state)
        _takes(after, Token(name, ""))
        # Without the token itself.
        after = _outer(after, len(after.state_stack) - 1)
        if len(after.state_stack) < len(settled.state_stack):
            settled = after
    return settled


def _outer(state: Parser, depth: int) -> Parser:
    """The parser without what is unfinished beyond a depth of its stack."""
    outer = _fork(state)
    del outer.state_stack[depth:]
    del outer.value_stack[depth - 1 :]
    return outer


def _open_blocks(state: Parser) -> list[Parser]:
    """The parser in each block that is open, the innermost first: where the text may go on."""
    #     schedule s { rank r { for m in 0 .. 4 { F(m  ??
    #                                             └── a statement of the loop
    #                           └── a statement of the rank
    #                  └── an item of the schedule
    settled = _settled(state)
    depths = range(len(settled.state_stack), 0, -1)
    outer = [_outer(settled, depth) for depth in depths]
    return [block for block in outer if _is_in_block(block)]


def _closed(state: Parser, end: int) -> Parser | None:
    """The parser where the text may end: open blocks are closed, and what is unfinished in them is
    left out. None if the text has not even begun.
    """
    while not accepts(state, END):
        blocks = [state, *_open_blocks(state)]
        block = next((each for each in blocks if accepts(each, "RBRACE")), None)
        if block is None:
            return None
        state = _fork(block)
        _takes(state, _sample("RBRACE", end))
    return state


def _tokens_in(state: Parser | None) -> list[Token]:
    """The tokens that a parser has read; without trees, its stack has lists of them."""
    found: list[Token] = []
    waiting = list(state.value_stack) if state else []
    while waiting:
        last = waiting.pop()
        if isinstance(last, Token):
            found.append(last)
        else:
            waiting += last
    return found[::-1]


def _located(token: Token, text: str) -> Token:
    """A token at its word, where a change gave it the place of a longer text."""
    start = text.find(token, _start(token), _end(token))
    if start < 0:
        return token
    end = start + len(token)
    return Token(token.type, str(token), start_pos=start, end_pos=end)


def _is_in_block(state: Parser) -> bool:
    """Whether the parser stands behind a brace that opens a block, or a list of what is in one."""
    *before, last = [None, *state.value_stack]
    if isinstance(last, Token):
        return last.type == "LBRACE"
    return not before or (isinstance(before[-1], Token) and before[-1].type == "LBRACE")


def _indent(line: str) -> int:
    """How many blanks a line begins with."""
    return len(line) - len(line.lstrip())
