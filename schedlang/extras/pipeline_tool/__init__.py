"""`schedc pipeline`: the options, keys and figures of a public visualizer of pipeline schedules.

That is Victarry/PP-Schedule-Visualization (MIT). The options and keys are those of its first
version, a command for 1F1B (commit ec19476); strategies and `key=value` arguments are those of its
later version (commit 1dd92bf).
"""
