"""The one exception for what a caller got wrong."""


class InputError(ValueError):
    """Bad input: a file, an option, a model or a shape that cannot be used.

    The message says what came, what was expected and what to do. The command line prints it as one
    line without a traceback; every other exception is a defect and keeps its traceback.
    """
