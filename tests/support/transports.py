"""The transports that tests go through."""

from schedlang.schedule.transports import NAMES, PORTABLE

#: All, one by one; a buffer of two is the least in which messages of one channel wait together.
TRANSPORTS = [*(name for name in NAMES if name != PORTABLE), "buffered:2"]
