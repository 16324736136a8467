"""`anybit bench`: speed against a peer or a limit, both measured in one run."""
