"""`anybit compare`: what is asked for (cells), how it is made (runner, job) and shown (report)."""

from anybit.compare.cells import Settings, parse_entry
from anybit.compare.runner import compare

__all__ = ["Settings", "compare", "parse_entry"]
