"""`python -m anybit` is the `anybit` command."""

from anybit.cli.main import main

main()
