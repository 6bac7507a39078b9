"""Where the lines of a formatted program begin, and what stands in them.

What the author has chosen stays: which blocks are in one line, which ops stand side by side, where
a line is left free. All else follows from the text, so that there is one way to write it.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import define, field, frozen
from lark import Token

from schedlang.language.concrete import Branch, Gap, gap

#: The most columns of a line, where it can be shorter.
WIDTH = 120

#: Rules that hold statements, and are none themselves.
_LISTS = frozenset({"items", "rows", "placed_ops", "ops"})
#: Statements that share a line with no other, where their block has lines of its own.
_ALONE = frozenset({"let", "fn", "require", "assert", "placed", "row", "part"})
#: How tightly operators bind: what binds less is where a long line ends first.
_BINDING = {
    **dict.fromkeys(("or",), 0),
    **dict.fromkeys(("and",), 1),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), 2),
    **dict.fromkeys(("add", "sub"), 3),
    **dict.fromkeys(("mul", "div", "mod"), 4),
}
#: Where nothing else is left, a line ends within a list of names.
_LAST = 1000


@define
class Block:
    """Braces, by the numbers of their tokens, and the statements in them."""

    open: int
    close: int
    is_of_items: bool
    statements: list[Statement] = field(factory=list)
    #: Whether each statement has lines of its own; otherwise all stand in one.
    is_open: bool = False


@define
class Statement:
    """A statement, by the numbers of its first token and of the one behind it; and the blocks that
    it is made of, those behind `else` included.
    """

    rule: str
    first: int
    stop: int = 0
    blocks: list[Block] = field(factory=list)


@frozen
class Layout:
    """The tokens of a text, and for each what is before it.

    `gaps` has one entry more, for the end of the text. `spaces` are those before a token within a
    line; `breaks` has the tokens that begin a line, each with the depth of that line.
    `comment_depths` are those of comments before a token. `boundaries` are the tokens before which
    a line may be left free. `statements` has each statement by its first token.
    """

    tokens: list[Token]
    gaps: list[Gap]
    spaces: list[int]
    breaks: dict[int, int]
    boundaries: frozenset[int]
    statements: dict[int, Statement]
    comment_depths: dict[int, int]


def lay_out(text: str, branch: Branch) -> Layout:
    """The layout of a text that was parsed."""
    reader = _Reader(text)
    whole = reader.read(branch)
    planner = _Planner(reader)
    planner.plan(whole)
    return Layout(
        reader.tokens,
        reader.gaps,
        reader.spaces,
        planner.breaks,
        frozenset(planner.boundaries),
        {statement.first: statement for statement in reader.statements},
        planner.comment_depths,
    )


@define
class _Reader:
    """Goes through the parse once, and numbers the tokens."""

    text: str
    tokens: list[Token] = field(factory=list)
    gaps: list[Gap] = field(factory=list)
    spaces: list[int] = field(factory=list)
    #: Where a long statement may be broken, and how deep in its expressions that is.
    levels: dict[int, int] = field(factory=dict)
    #: The `else` of statements.
    elses: set[int] = field(factory=set)
    statements: list[Statement] = field(factory=list)
    #: The last token, if it is the sign of a number.
    sign: Token | None = None

    def read(self, branch: Branch) -> Block:
        """The whole text as a block; of a list of items, the braces are its beginning and end."""
        whole = Block(-1, 0, is_of_items=True)
        if branch.rule == "items":
            self.statements_of(branch, whole)
        else:
            self.statement(branch, whole)
        whole.close = len(self.tokens)
        whole.is_open = True
        self.gaps.append(gap(self.text, self.end, len(self.text)))
        return whole

    @property
    def end(self) -> int:
        """Where the last token ends."""
        return (self.tokens[-1].end_pos or 0) if self.tokens else 0

    def statement(self, branch: Branch, block: Block) -> None:
        """Read a statement of a block."""
        statement = Statement(branch.rule, len(self.tokens))
        self.statements.append(statement)
        block.statements.append(statement)
        self.part(branch, statement, 0)
        statement.stop = len(self.tokens)
        if statement is not block.statements[0]:
            self.spaces[statement.first] = 2

    def statements_of(self, branch: Branch, block: Block) -> None:
        """Read the statements of a list."""
        for part in branch.parts:
            assert isinstance(part, Branch)
            self.statement(part, block)

    def part(self, branch: Branch, statement: Statement, level: int) -> None:
        """Read a part of a statement, so deep in its expressions."""
        block: Block | None = None
        inner = level + 1
        for number, part in enumerate(branch.parts):
            if isinstance(part, Token):
                self.token(part, branch.rule)
                last = len(self.tokens) - 1
                if part.type == "LBRACE":
                    block = Block(last, 0, is_of_items=branch.rule == "schedule")
                    statement.blocks.append(block)
                elif part.type == "RBRACE" and block is not None:
                    block.close = last
                    block = None
                elif part.type == "ELSE" and branch.rule == "if":
                    self.elses.add(last)
                self.break_at(branch, part, level)
            elif part.rule in _LISTS and block is not None:
                self.statements_of(part, block)
            elif block is not None:
                self.statement(part, block)
            elif branch.rule == "pipeline" and part.rule == "stage":
                self.levels[len(self.tokens)] = level
                self.part(part, statement, inner)
            else:
                # In `a + b - c` all operands are as deep as each other, although the tree nests
                # them.
                goes_on = number in (0, len(branch.parts) - 1) and _is_chain(
                    branch, part
                )
                self.part(part, statement, level if goes_on else inner)

    def break_at(self, branch: Branch, token: Token, level: int) -> None:
        """Note where a line may end at a token that was read."""
        number = len(self.tokens) - 1
        if branch.rule in _BINDING or (branch.rule, token.type) == (
            "conditional",
            "ELSE",
        ):
            self.levels[number] = level
        elif (branch.rule, token.type) == ("conditional", "THEN"):
            self.levels[number] = level + 1
        elif token.type == "COMMA":
            is_list_of_names = branch.rule in ("names", "indices", "microbatches")
            self.levels[number + 1] = _LAST if is_list_of_names else level

    def token(self, token: Token, rule: str) -> None:
        """Read a token."""
        begin = token.start_pos or 0
        self.gaps.append(gap(self.text, self.end, begin))
        before = self.tokens[-1].type if self.tokens else ""
        is_of_list = token.type == "LSQB" and before == "NAME"
        is_call = is_of_list or (token.type == "LPAR" and rule != "atom")
        is_behind = before in ("LPAR", "LSQB") or self.sign is not None
        is_tight = is_behind or is_call or token.type in ("COMMA", "RPAR", "RSQB")
        self.spaces.append(0 if is_tight else 1)
        self.sign = token if (token.type, rule) == ("MINUS", "neg") else None
        if token.type != "STRING":
            # Words that are one token have one blank between them.
            token = token.update(value=" ".join(token.split()))
        self.tokens.append(token)


def _is_chain(branch: Branch, part: Branch) -> bool:
    """Whether a part goes on with what the whole is: `a + b` in `a + b - c`, or the condition
    behind an `else`.
    """
    binding = _BINDING.get(branch.rule)
    if binding is not None:
        return _BINDING.get(part.rule) == binding
    return branch.rule == part.rule == "conditional"


@define
class _Planner:
    """Decides where lines begin."""

    reader: _Reader
    breaks: dict[int, int] = field(factory=dict)
    boundaries: set[int] = field(factory=set)
    comment_depths: dict[int, int] = field(factory=dict)

    def plan(self, whole: Block) -> None:
        """Decide for the whole text."""
        for statement in whole.statements:
            self.open_blocks(statement)
        self.block(whole, 0)
        for number, before in enumerate(self.reader.gaps):
            if before.comments and number < len(self.reader.tokens):
                # Nothing of the line can stand behind a comment.
                self.breaks.setdefault(number, self.comment_depths.get(number, 0))

    def open_blocks(self, statement: Statement) -> bool:
        """Open the blocks that cannot stand in one line, or that the author has opened; whether a
        line ends within the statement.
        """
        is_any_open = False
        for block in statement.blocks:
            # A list, since all are to be looked at.
            inner = any([self.open_blocks(each) for each in block.statements])
            begins = [each.first for each in block.statements]
            is_written_open = any(
                self.reader.gaps[at].has_break for at in (*begins, block.close)
            )
            has_comment = any(
                self.reader.gaps[at].comments
                for at in range(block.open + 1, block.close + 1)
            )
            is_empty = not block.statements and not has_comment
            block.is_open = not is_empty and (
                inner or is_written_open or has_comment or block.is_of_items
            )
            is_any_open = is_any_open or block.is_open
        if is_any_open:
            self.open_all(statement)
        return is_any_open or any(self.ends_line(statement))

    def ends_line(self, statement: Statement) -> Iterator[bool]:
        """For the tokens of a statement whether the author ended a line before them that is kept:
        at an `else` behind a block in one line, or by a comment.
        """
        for number in range(statement.first + 1, statement.stop):
            before = self.reader.gaps[number]
            is_else = number in self.reader.elses
            yield bool(before.comments) or (is_else and before.has_break)

    def open_all(self, statement: Statement) -> None:
        """Open all blocks of a statement: those of an `if` and its `else` are alike."""
        for block in statement.blocks:
            block.is_open = bool(block.statements) or block.is_open

    def block(self, block: Block, depth: int) -> None:
        """Decide for an open block whose statements stand at a depth."""
        self.boundaries.add(block.close)
        self.comment_depths[block.close] = depth
        line: list[Statement] = []
        for statement in block.statements:
            is_alone = (
                block.is_of_items
                or statement.rule in _ALONE
                or self.is_spread(statement)
            )
            if line and (is_alone or self.reader.gaps[statement.first].has_break):
                self.line(line, depth)
                line = []
            line.append(statement)
            if is_alone:
                self.line(line, depth)
                line = []
        self.line(line, depth)

    def is_spread(self, statement: Statement) -> bool:
        """Whether a statement has several lines already."""
        is_open = any(block.is_open for block in statement.blocks)
        return is_open or any(self.ends_line(statement))

    def line(self, statements: list[Statement], depth: int) -> None:
        """Decide for statements that the author has written in one line."""
        if not statements:
            return
        # Statements that do not fit side by side get a line each.
        fits = self.width(statements[0].first, statements[-1].stop) + 4 * depth <= WIDTH
        for number, statement in enumerate(statements):
            self.boundaries.add(statement.first)
            self.comment_depths[statement.first] = depth
            if number == 0 or not fits:
                self.breaks[statement.first] = depth
            if len(statements) == 1 or not fits:
                self.statement(statement, depth)

    def statement(self, statement: Statement, depth: int) -> None:
        """Decide for a statement that begins a line."""
        segments = list(self.segments(statement))
        too_long = any(self.width(*segment) + 4 * depth > WIDTH for segment in segments)
        if too_long and not any(block.is_open for block in statement.blocks):
            self.open_all(statement)
        for number in range(statement.first + 1, statement.stop):
            self.comment_depths.setdefault(number, depth + 1)
        is_open = any(block.is_open for block in statement.blocks)
        for number in self.reader.elses.intersection(
            range(statement.first, statement.stop)
        ):
            if any(block.open < number < block.close for block in statement.blocks):
                continue
            self.comment_depths[number] = depth
            if self.reader.gaps[number].comments or (
                not is_open and self.reader.gaps[number].has_break
            ):
                self.breaks[number] = depth
        for segment in self.segments(statement):
            self.wrap(*segment, depth, 4 * depth)
        for block in statement.blocks:
            if block.is_open:
                self.block(block, depth + 1)
                self.breaks[block.close] = depth

    def segments(self, statement: Statement) -> Iterator[tuple[int, int]]:
        """The tokens that stand in one line each, as ranges: a statement is cut where its blocks
        are open, and at each `else` that begins a line.
        """
        begin = statement.first
        cuts = {
            block.open + 1: block.close for block in statement.blocks if block.is_open
        }
        number = begin
        while number < statement.stop:
            if number in cuts:
                yield begin, number
                begin = number = cuts[number]
            elif number > begin and self.breaks_at_else(number, statement):
                yield begin, number
                begin = number
            number += 1
        yield begin, statement.stop

    def breaks_at_else(self, number: int, statement: Statement) -> bool:
        """Whether a token is an `else` that begins a line, or stands behind a comment."""
        before = self.reader.gaps[number]
        is_open = any(block.is_open for block in statement.blocks)
        is_else = number in self.reader.elses and before.has_break and not is_open
        return bool(before.comments) or is_else

    def wrap(self, first: int, stop: int, depth: int, column: int) -> None:
        """Break some tokens into lines, where they are too long for one."""
        if column + self.width(first, stop) <= WIDTH:
            return
        places = [at for at in range(first + 1, stop) if at in self.reader.levels]
        if not places:
            return
        # The outermost places first, and all of them, so that what belongs together looks alike:
        #
        #     let n = first + second          and not     let n = first
        #         + third                                     + second + third
        level = min(self.reader.levels[at] for at in places)
        starts = [first, *(at for at in places if self.reader.levels[at] == level)]
        for begin, end in zip(starts, [*starts[1:], stop], strict=True):
            if begin != first:
                self.breaks[begin] = depth + 1
                column = 4 * (depth + 1)
            self.wrap(begin, end, depth, column)

    def width(self, first: int, stop: int) -> int:
        """How many columns some tokens take in one line."""
        spaces = sum(self.reader.spaces[first + 1 : stop])
        return spaces + sum(map(len, self.reader.tokens[first:stop]))
