"""Mutations of everything that comes from outside; `python -m tests.fuzz --help`."""
