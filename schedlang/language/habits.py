"""What people write who come from other languages, and how it is written here: texts at which a
program stops being one.
"""

from attrs import frozen

from schedlang.schedule.kinds import OPS

#: The words of ops, as one pattern.
_OP = rf"(?:{'|'.join(op.word for op in OPS.values())}|BW)"
#: An operand, as far as a pattern can know one: a name, a number, a call, something in parentheses.
_TERM = r"(?:\w+(?:\([^()\n]*\))?|\([^()\n]*\))"


@frozen
class Habit:
    """A text of another language.

    The mistake is at its group `at`, or else where the parser stops. `write` is the text to put in
    its place, with the groups of the pattern: what messages show is the user's own text, rewritten.
    Without it, what stands there cannot be written here. `help` says more, `{}` being that text.
    """

    pattern: str
    write: str | None = None
    help: str = "write `{}`"


_NO_LOOP = "how often a loop runs is known before it: `repeat n { … }`, `for m in 0 .. n { … }`"
_NO_CHANGE = "a name keeps its value: give another one a new name, `let more = n + 1`"
_RANGE = "write `{}`: a range ends before its second number"
_BRACES = (
    "what belongs together stands in braces: `rank r { … }`, `for m in 0 .. n { … }`"
)
_FUNCTION = "write `{}`: a function is one expression"
_ONE_ORDER = (
    "write `{}`: one `rank` says what every rank does, "
    "`if r == 0 { … }` what only one does"
)
_DIGITS = "write `{}`: there are digits on both sides of a point"
_A_LIST = (
    "a list has a name, before `rank`: `let time = [3, 2, 2]`; a value for each stage is an "
    "expression of the stage, `cost F(s) = time[s]`"
)
_NOTHING_TO_DO = (
    "a program says which ops there are, in order, "
    "and nothing else happens in it: leave it out"
)

_NO_PHASES = (
    "phases have no names: write their ops one after the other, `repeat n { F(next) }`; "
    "`warmup { … }` and `steady { … }` are for schedules without a flush, whose cool-down "
    "follows from the two"
)

#: What begins a statement, behind a value on the same line.
_NEXT_STATEMENT = (
    rf"\s(?:repeat|for|let|fn|assert|exchange|overlap|steady|(?:{_OP})\s*\()"
)

_NOW = "write `{}`, as `schedc fmt` does"

#: Forms that the language had before.
FORMER = (
    Habit(r"(?P<at>exchange)\s*(?=\{)", "overlap ", _NOW),
    Habit(r"link\s+(?P<at>\w+)\s+on\b", r"link(\g<at>) =", _NOW),
    Habit(r"(?P<at>keep)\s+(?P<r>\w+)\s+on\b", r"keeper(\g<r>) =", _NOW),
    Habit(
        rf"weights\s+delay\s+(?P<at>-?{_TERM}(?:\s*[-+*/%]\s*{_TERM})*)",
        r"weights delay(\g<at>)",
        _NOW,
    ),
    Habit(r"frozen\s+(?P<at>\w+\s+in\b)", "frozen", _NOW),
)

HABITS = (
    *FORMER,
    # Operators.
    Habit(r"(?P<at>&&?)", "and"),
    Habit(r"(?P<at>\|\|?)", "or"),
    Habit(r"(?P<at><>|~=|=/=|≠|!==)", "!="),
    Habit(r"(?P<at>!)(?=[\w(])", "not "),
    Habit(r"(?P<at>===)", "=="),
    Habit(r"(?P<at>==)", "=", "write `{}`: it gives a name its value, `==` compares"),
    Habit(r"(?P<at>:=|<-|=>)", "="),
    Habit(r"(?P<at>=<|≤)", "<="),
    Habit(r"(?P<at>=>|≥)", ">="),
    Habit(
        r"(?P<at>=)(?!=)", "==", "write `{}`: it compares, `=` gives a name its value"
    ),
    Habit(r"(?P<at>\*\*|\^)", "*", "there is no power: write a product, `2 * 2 * 2`"),
    Habit(r"(?P<at>%%)", "%"),
    Habit(r"(?P<at>//)(?=\s*[\w(])", "/", "write `{}`: it rounds down"),
    Habit(r"(?P<at>//[^\n]*)", "", "a comment begins with `#`"),
    Habit(r"(?P<at>/\*.*?\*/)", "", "a comment begins with `#`, on each of its lines"),
    Habit(r"(?P<at>--[^\n]*)", "", "a comment begins with `#`"),
    Habit(r"(?P<at>\u00d7|\u00b7|\u2217)", "*"),
    Habit(r"(?P<at>÷)", "/"),
    Habit(r"(?P<at>[\u2212\u2013\u2014])", "-", "write `{}`, the hyphen of a keyboard"),
    Habit(r"(?P<at>…)", ".."),
    Habit(
        rf"(?P<a>{_TERM})\s*(?P<l><=?|>=?)\s*(?P<b>{_TERM})\s*(?P<at><=?|>=?)\s*(?P<c>{_TERM})",
        r"\g<a> \g<l> \g<b> and \g<b> \g<at> \g<c>",
    ),
    Habit(
        rf"(?P<a>\w+)\s+(?P<at>in)\s+(?P<b>{_TERM})\s*\.\.\s*(?P<c>{_TERM})",
        r"\g<a> >= \g<b> and \g<a> < \g<c>",
        "write `{}`: `in` is for loops",
    ),
    # Conditions.
    Habit(
        r"(?:(?<=[^=<>!]=)(?!=)|(?<=[(,])|(?<=\bon)|(?<=\brepeat))\s*"
        r"(?P<c>(?:[^?\n,()]|\([^()\n]*\))+?)\s*(?P<at>\?)\s*"
        r"(?P<a>[^:\n]+?)\s*:\s*(?P<b>[^\n;,}]+)",
        r" if \g<c> then \g<a> else \g<b>",
    ),
    Habit(
        r"(?<==)\s*(?P<a>[^=\n]+?)\s+(?P<at>if)\s+(?P<c>[^\n{]+?)\s+else\s+(?P<b>[^\n{};]+)",
        r" if \g<c> then \g<a> else \g<b>",
    ),
    Habit(
        r"if\s+(?P<c>[^\n{]+?)\s*(?P<at>\{)\s*(?P<a>[^\n{}]+?)\s*\}\s*else\s*\{\s*(?P<b>[^\n{}]+?)\s*\}",
        r"if \g<c> then \g<a> else \g<b>",
        "write `{}`: braces are for statements",
    ),
    Habit(r"(?P<at>elif|elsif|elseif|elsf)\b", "else if"),
    Habit(
        r"(?P<at>then)\s*(?=\{)",
        "",
        "leave `then` out: it stands in values, `if a then b else c`",
    ),
    Habit(
        r"(?P<o>[<>=!]=|[<>+\-*/%])\s*(?P<at>if)\b(?P<rest>[^\n{}]+)",
        r"\g<o> (if\g<rest>)",
        "write `{}`: a choice within an expression stands in parentheses",
    ),
    Habit(
        r"(?P<at>switch|match|case|when)\b",
        None,
        "write `if r == 0 { … } else if r == 1 { … } else { … }`",
    ),
    # Ranges and loops.
    Habit(
        r"in\s+(?P<at>range)\s*\((?P<a>[^,\n{:]+?)\s*-\s*1,\s*-1,\s*-1\s*\)",
        r"in 0 .. \g<a> by -1",
        _RANGE,
    ),
    Habit(
        r"in\s+(?P<at>range)\s*\((?P<a>[^,\n{:]+),\s*(?P<b>[^,\n{:]+),\s*(?P<s>\w+)\s*\)",
        r"in \g<a> .. \g<b> by \g<s>",
        _RANGE,
    ),
    Habit(
        r"in\s+(?P<at>reversed|rev)\s*\(\s*range\s*\((?P<a>[^,\n{:()]+)\)\s*\)",
        r"in 0 .. \g<a> by -1",
        _RANGE,
    ),
    Habit(
        rf"in\s+(?P<a>{_TERM})\s*\.\.\s*(?P<b>[^\n{{:]+?)\s*(?P<at>step|stepby|every)\s+(?P<s>-?\w+)",
        r"in \g<a> .. \g<b> by \g<s>",
    ),
    Habit(
        r"in\s+(?P<at>range)\s*\((?P<a>[^,\n{:]+),\s*(?P<b>[^,\n{:]+)\)",
        r"in \g<a> .. \g<b>",
        _RANGE,
    ),
    Habit(r"in\s+(?P<at>range)\s*\((?P<a>[^,\n{:]+)\)", r"in 0 .. \g<a>", _RANGE),
    Habit(
        r"(?P<at>\.\.=)\s*(?P<a>[^\n{]+?)(?=\s*\{)",
        r".. \g<a> + 1",
        "write `{}`: a range ends before its second number",
    ),
    Habit(r"(?P<at>\.\.\.)", "..", _RANGE),
    Habit(r"(?P<at>\.\.<)", "..", _RANGE),
    Habit(
        rf"\bin\s+\[(?P<a>{_TERM})\s*,\s*(?P<b>{_TERM})[\])]",
        r"in \g<a> .. \g<b>",
        _RANGE,
    ),
    Habit(
        rf"\bin\s+(?P<a>{_TERM})\s*(?P<at>:|to|until|,)\s*(?P<b>{_TERM})",
        r"in \g<a> .. \g<b>",
        _RANGE,
    ),
    Habit(r"\bin\s+(?P<at>[^.\n{:]+?)(?=\s*[{:])", r"in 0 .. \g<at>", _RANGE),
    Habit(
        r"for\s*\(?\s*(?:int|let|var|auto)?\s*(?P<m>\w+)\s*:?=\s*(?P<a>\w+)\s*(?:;|to)\s*"
        r"(?:\w+\s*<\s*)?(?P<b>[^;{\n]+?)\s*(?:;[^{\n)]*)?\)?(?=\s*\{)",
        r"for \g<m> in \g<a> .. \g<b>",
    ),
    Habit(r"(?P<at>foreach)\b", "for"),
    Habit(r"(?P<at>while|until|loop|do)\b", None, _NO_LOOP),
    Habit(rf"repeat\s+(?P<n>{_TERM})\s*(?P<at>times|x|\*)", r"repeat \g<n>"),
    Habit(
        r"(?P<at>warmup|steady)\s*(?=\{)",
        None,
        "`warmup { … }` and `steady { … }` stand directly in `rank r { … }`; a loop or an `if` "
        "stands within them",
    ),
    Habit(
        r"(?i)(?P<at>(?!warmup\b)(?:phase\s+)?(?:(?:warm|cool|ramp|wind)_?(?:up|down)|drain|fill|prologue|epilogue|"
        r"main|kernel|body|steady_?state|one_?f_?one_?b)(?:_phase)?|phase(?:\s+\w+)?)\s*(?=\{)",
        None,
        _NO_PHASES,
    ),
    Habit(
        r"(?P<at>break|continue|return|yield|goto|pass|end|begin|done|fi)\b;?",
        None,
        _NOTHING_TO_DO,
    ),
    Habit(
        r"(?P<at>print|printf|println|log|echo|assert_eq|debug)\b[^\n}]*",
        "",
        _NOTHING_TO_DO,
    ),
    Habit(
        r"(?P<at>wait|barrier|sync|synchronize|await|async)\b[^\n}]*",
        "",
        "nobody waits by word: an op waits for what it needs, and the compiler places transfers",
    ),
    # What ends and joins statements.
    Habit(r"(?P<at>;)", "", "a statement needs no end: leave the `;` out"),
    Habit(
        r"(?<=[\w)}])\s*(?P<at>,)(?=\s*(?:$|}|\w))",
        "",
        "no comma stands between statements",
    ),
    Habit(r"(?P<at>:)(?=\s*(?:$|#|\w))", "{", _BRACES),
    # Values.
    Habit(r"weights\s*(?P<at>=|:)\s*(?P<v>\w+)", r"weights \g<v>"),
    Habit(r"(?P<at>(?:let\s+)?mut\b)\s*", "let ", "write `let`: no value changes"),
    Habit(
        r"(?P<at>var|const|val|int|auto|set|local|final|static)\s+(?P<n>\w+)(?=\s*=)",
        r"let \g<n>",
    ),
    Habit(r"(?P<n>\w+)\s*(?P<at>[-+*/%]=|\+\+|--)[^\n}]*", "", _NO_CHANGE),
    Habit(
        r"(?P<n>\b[A-Za-z_]\w*)\s*(?P<at>=)(?!=)\s*(?P<v>[^={\n;}]*\b(?P=n)\b[^={\n;}]*)(?!\s*=)",
        "",
        _NO_CHANGE,
    ),
    Habit(
        rf"(?P<at>def|define|set)\s+(?P<n>\w+)\s*=\s*(?P<v>{_TERM})",
        r"param \g<n> = \g<v>",
        "write `{}`, which a user may set with `-p`; or `let`",
    ),
    Habit(
        rf"(?P<at>def|define|set)\s+(?P<n>\w+)\s*=\s*(?P<v>{_TERM})",
        r"let \g<n> = \g<v>",
    ),
    Habit(
        r"(?P<n>\b[A-Za-z_]\w*)\s*(?P<at>:?=)(?!=)\s*"
        rf"(?P<v>(?:(?!{_NEXT_STATEMENT})[^\n;}}])+)",
        r"let \g<n> = \g<v>",
        "write `{}`; and what has a value keeps it",
    ),
    Habit(
        r"(?P<head>(?:let|param)\s+\w+)\s*(?P<at>:)\s*[A-Za-z]\w*\s*(?==)",
        r"\g<head> ",
        "write `{}`: a value is a number, without a type",
    ),
    Habit(
        r"(?P<head>(?:let|param|cost|memory)\s+\w+)\s*(?P<at>:)\s*(?P<v>\w+)",
        r"\g<head> = \g<v>",
    ),
    Habit(r"let\s+(?P<n>\w+)\s*(?P<at>\()(?P<a>[^()\n]*)\)\s*=", r"fn \g<n>(\g<a>) ="),
    Habit(
        r"(?P<at>def|func|function|fun|lambda)\s+(?P<n>\w+)\s*\((?P<a>[^()\n]*)\)\s*(?::|->|=>|=|\{)?"
        r"\s*(?:return\b)?\s*(?P<v>[^\n{}:;]+)[;}]?",
        r"fn \g<n>(\g<a>) = \g<v>",
        _FUNCTION,
    ),
    Habit(
        r"fn\s+(?P<n>\w+)\s*\((?P<a>[^()\n]*)\)\s*(?P<at>\{|->|=>|:)\s*(?:return\b)?"
        r"\s*(?P<v>[^\n{}:;]+);?\s*\}?",
        r"fn \g<n>(\g<a>) = \g<v>",
        _FUNCTION,
    ),
    Habit(r"(?P<at>\.\d+)", r"0\g<at>", _DIGITS),
    Habit(r"(?P<n>\d+)(?P<at>\.)(?![.\d])", r"\g<n>.0", _DIGITS),
    Habit(r"(?P<n>\d+)(?P<at>(?:_\d+)+)", r"\g<n>", "write the digits without `_`"),
    Habit(
        r"(?P<n>\d+(?:\.\d+)?)(?P<at>e-?\d+)",
        r"\g<n>",
        "write the number out: `1000` for `1e3`",
    ),
    Habit(r"(?P<n>0)(?P<at>[xXbo][0-9a-fA-F]+)", r"\g<n>", "numbers are decimal"),
    Habit(r"'(?P<text>[^'\n\"]*)'", r'"\g<text>"'),
    Habit(r"[“”](?P<text>[^“”\n\"]*)[“”]", r'"\g<text>"'),
    Habit(
        r"(?P<head>(?:require|assert)\b[^\n\"]*\S)\s*(?P<at>:)\s*(?=\")",
        r"\g<head>, ",
        "write a comma before the reason",
    ),
    Habit(
        r"(?P<head>(?:require|assert)\b[^\n\"]*[^\s,])\s+(?P<at>\"[^\"\n]*\")",
        r"\g<head>, \g<at>",
        "write a comma before the reason",
    ),
    Habit(
        r"(?P<word>require|assert)\s*\((?P<c>[^\"\n]+),\s*(?P<at>\"[^\"\n]*\")\s*\)",
        r"\g<word> \g<c>, \g<at>",
    ),
    # Ops.
    Habit(
        rf"(?P<op>\b{_OP})\s*(?P<at>[\[<{{])\s*(?P<a>[^\]>}}\n]*)\s*[\]>}}]",
        r"\g<op>(\g<a>)",
    ),
    Habit(
        rf"(?P<s>\b\d+)(?P<at>{_OP})(?P<m>\d+)\b",
        r"\g<at>(\g<s>, \g<m>)",
        "write `{}`: the stage and the microbatch stand behind the op",
    ),
    Habit(rf"(?P<at>\b(?P<op>{_OP})(?P<m>\d+)\b)", r"\g<op>(\g<m>)"),
    Habit(rf"(?P<op>\b{_OP})\s+(?P<at>(?:next|\w+)(?:\s*,\s*\w+)*)", r"\g<op>(\g<at>)"),
    Habit(r"(?P<at>(?i:forward|fwd|fprop)(?:_pass|_step)?)\b", "F"),
    Habit(r"(?P<at>(?i:backward|bwd|bprop)(?:_pass|_step)?)\b", "B"),
    Habit(
        r"(?P<at>(?:optimizer|opt|optim)(?:\.step|_step)?|step|update)\b\s*(?:\(\s*\))?",
        "U",
    ),
    Habit(
        r"(?P<at>(?i:(?P<d>send|recv|receive))_?(?i:(?P<f>forward|fwd|F)|backward|bwd|B)(?:_\w+)?)\b",
        None,
        "write `send F(m)` or `recv F(m)`, `send B(m)` or `recv B(m)`; or none: without transfers "
        "of its own, a program gets them from the compiler",
    ),
    Habit(
        r"(?P<d>send|recv)\s*(?P<at>\()\s*(?P<f>[FB])\s*,\s*(?P<m>[^()\n]+)\)",
        r"\g<d> \g<f>(\g<m>)",
    ),
    Habit(
        r"(?P<d>send|recv)\s*(?P<at>\()(?P<m>[^()\n]*)\)",
        r"\g<d> F(\g<m>)",
        "say what is sent: `send F(m)` an activation, `send B(m)` its gradient",
    ),
    Habit(r"(?<=\))\s*(?P<at>@)\s*(?=[\w(])", " at "),
    Habit(r"(?P<at>\[)[^\]\n]*\]", "0", _A_LIST),
    Habit(r"(?P<at>,)\s*(?=[)\]])", "", "leave the comma out: nothing follows it"),
    Habit(
        r"(?P<at>(?:\"[^\"\n]*\"|'[^'\n]*'))",
        "0",
        "values are numbers: a text gives the reason behind `require` and `assert`",
    ),
    Habit(
        r"(?P<at>\w*[^\W\d_a-zA-Z]\w*)",
        "x",
        "names have the letters a to z and A to Z, digits and `_`",
    ),
    # What a program is made of.
    Habit(
        r"rank\s*(?P<at>\(?\d+\)?)\s*(?=[:{])",
        "rank r ",
        _ONE_ORDER,
    ),
    Habit(
        r"rank\s+(?P<r>\w+)\s+(?P<at>in)\s+[^\n{]+?(?=\s*[{:])",
        r"rank \g<r>",
        _ONE_ORDER,
    ),
    Habit(
        r"schedule\s+(?P<at>\"(?P<n>[A-Za-z_]\w*)[^\n\"]*\")",
        r"schedule \g<n>",
    ),
    Habit(
        r"schedule\s+(?P<at>(?P<d>\d+)(?P<n>\w*))",
        r"schedule s\g<d>\g<n>",
        "write `{}`, or another name: one begins with a letter",
    ),
    Habit(
        r"schedule\s+(?P<n>\w+)(?P<at>-)(?P<m>[\w-]+)",
        r"schedule \g<n>_\g<m>",
        "write `_` in names",
    ),
    Habit(
        r"schedule\s+(?P<n>\w+)\s*(?P<at>\()[^()\n]*\)",
        r"schedule \g<n>",
        "parameters stand within: `schedule name { param ranks = 4 … }`",
    ),
    Habit(
        r"(?P<word>param|let)\s+(?P<n>\w+)\s*=\s*(?P<v>\w+)\s*(?P<at>,)\s*(?=\w+\s*=)",
        r"\g<word> \g<n> = \g<v> \g<word> ",
        "each has a line of its own: `let a = 1`, `let b = 2`",
    ),
    Habit(r"(?P<word>param|let)\s+(?:int|i32|u32)\s+(?P<at>\w+)", r"\g<word> \g<at>"),
    Habit(r"(?P<word>param)\s+(?P<n>\w+)\s+(?P<at>\d+)", r"\g<word> \g<n> = \g<at>"),
    Habit(r"(?P<at>from)\s+(?P<f>[\w.]+)\s+import\b[^\n]*", r'import "\g<f>.sched"'),
    Habit(r"(?P<at>include|use|require|using)\s+(?P<f>\"[^\"\n]+\")", r"import \g<f>"),
    Habit(
        r"import\s+(?P<at>(?P<f>[\w./]+?)(?:\.sched)?)(?=\s|$)", r'import "\g<f>.sched"'
    ),
    Habit(
        r"(?P<head>stage\s+\w+\s+in\s+[^\n]+?)\s+(?P<at>at)\s+(?P<rest>\S[^\n]*)",
        r"\g<head> on \g<rest>",
    ),
    Habit(
        r"stage\s+(?P<s>\w+)\s+(?P<at>on)\s+(?P<r>[^\n]+)",
        r"stage \g<s> in 0 .. ranks on \g<r>",
    ),
    Habit(
        r"cost\s+(?P<at>transfers?|transport|comm|communication|p2p|latency|messages?|link)\b",
        "cost send",
        "write `{}`: what a message takes between two ranks",
    ),
    Habit(
        r"(?P<word>cost|memory)\s+(?P<n>[A-Z]+)\s+(?P<at>\d+)",
        r"\g<word> \g<n> = \g<at>",
    ),
    Habit(r"(?P<word>squeeze|reorder|greedy)\s*(?P<at>\(\s*\))", r"\g<word>"),
    Habit(r"(?:overlap|exchange)\s*(?P<at>\((?P<a>[^\n]*)\))", r"overlap { \g<a> }"),
    Habit(
        r"(?P<at>[\u00a0\u200b\u2060\ufeff]+)",
        "",
        "it looks like a blank, and is none: type it anew",
    ),
    Habit(r"(?P<at>\$|@|\\|`|~|\?)", "", "no program has this character"),
)
