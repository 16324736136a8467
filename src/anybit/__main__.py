"""`python -m anybit` is the `anybit` command."""

from anybit.cli import main

main()
