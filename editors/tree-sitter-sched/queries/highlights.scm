; Made from grammars/sched.lark: python -m tools.grammars.tree_sitter FOLDER
(comment) @comment
(string) @string
(number) @number
(decimal) @number.float
(name) @variable
(reference) @variable
(param (name) @constant)
(fn . (name) @function)
(pipeline . (name) @function)
(call . (name) @function.call)
((call . (name) @function.builtin) (#any-of? @function.builtin "min" "max" "abs"))
["and" "assert" "at" "block" "by" "capacity" "cost" "edge" "else" "every" "fill" "fn" "for" "from" "frozen" "gather" "gradients" "greedy" "if" "import" "in" "keeper" "let" "link" "memory" "model" "next" "not" "objective" "on" "or" "overlap" "param" "pipeline" "rank" "recompute" "reorder" "repeat" "require" "run" "runs" "schedule" "seq" "skip" "squeeze" "stage" "steady" "sum" "then" "to" "warmup" "weights" "within"] @keyword
(for_all) @keyword
["B" "BW" "F" "I" "R" "U" "W" "exchange" "offload" "recv" "reduce" "reload" "reshard" "send" "unshard"] @type.builtin
["!=" "%" "*" "+" "-" ".." "/" "<" "<=" "=" "==" ">" ">=" "[" "]"] @operator
["{" "}" "(" ")"] @punctuation.bracket
"," @punctuation.delimiter
