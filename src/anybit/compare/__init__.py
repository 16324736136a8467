"""`anybit compare`: what is asked for (cells), how it is made (runner, job) and shown (report)."""

from anybit.compare.cells import USUAL, Settings, parse_entry
from anybit.compare.runner import compare

__all__ = ["USUAL", "Settings", "compare", "parse_entry"]
