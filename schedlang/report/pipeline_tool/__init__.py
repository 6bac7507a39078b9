"""`schedc pipeline`: in the place of a public visualizer of pipeline schedules, with its options,
keys and figures.

That is Victarry/PP-Schedule-Visualization (MIT): its first version, a command for 1F1B (commit
ec19476), whose options and keys these are; and its later version with strategies and `key=value`
arguments (commit 1dd92bf).
"""

from schedlang.report.pipeline_tool.quirks import quirky_bubble_rate, quirky_timeline
from schedlang.report.pipeline_tool.settings import Settings, settings_of

__all__ = ["Settings", "quirky_bubble_rate", "quirky_timeline", "settings_of"]
