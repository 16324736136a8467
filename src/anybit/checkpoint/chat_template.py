"""Chat templates, rendered in a process of their own: a template is a program that comes with a model.

Transformers runs it in Jinja's sandbox, which keeps it from files and from Python, but not from loops without end.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from anybit.checkpoint.files import cause
from anybit.errors import InputError

SECONDS = 2  # of a processor that a template may take
PATIENCE = 20.0  # seconds of a clock: the machine may be busy
MEMORY = 512 << 20  # bytes that it may take, beyond those of this process
LONGEST = 4 << 20  # bytes of what it makes: a tokenizer takes a hundred times as much

_GOOD, _BAD = b"+", b"-"  # before what a child sends: a text, or what went wrong


def render(source: str, tokenizer: Any, messages: Sequence[dict[str, str]]) -> str:
    """A conversation as text, ready for the model's answer.

    Args:
        source: the model, as errors name it.
        tokenizer: has the template.
        messages: with `role` and `content`.

    Raises:
        InputError: a template that the sandbox refuses, that fails, or that takes too much time or memory.
    """
    context = multiprocessing.get_context("fork")  # at once, with the tokenizer as it is
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_render, args=(sender, tokenizer, messages), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(PATIENCE):
            raise _bad(source, f"it takes more than {PATIENCE:g} s")
        answer = receiver.recv_bytes(LONGEST + 1)
    except (EOFError, OSError) as error:  # it was ended, or sends too much
        process.join(0.5)
        slow = process.exitcode == -signal.SIGXCPU
        raise _bad(
            source, f"it takes more than {SECONDS} s" if slow else "it takes too much memory"
        ) from error
    finally:
        process.kill()
        process.join()
        receiver.close()
    if not answer.startswith(_GOOD):
        raise _bad(source, answer[1:].decode())
    return answer[1:].decode()


def _bad(source: str, why: str) -> InputError:
    return InputError(
        f"the chat template of {source} cannot be used ({why}): use `anybit generate`, or the template that the "
        "model's makers give"
    )


def _render(sender: Connection, tokenizer: Any, messages: Sequence[dict[str, str]]) -> None:
    """In the child: send the text, or what went wrong."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is for the parent
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    _limit_memory()
    try:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        answer = _GOOD + text.encode()
    except Exception as error:  # whatever a template raises, MemoryError and RecursionError among it
        answer = _BAD + f"{type(error).__name__}: {cause(error)}".encode(errors="replace")
    with suppress(OSError):  # the parent has given up
        sender.send_bytes(answer)
    os._exit(0)  # nothing of the parent's is to be closed twice


def _limit_memory() -> None:
    """Let the process take no more than it has now and `MEMORY`, where the system can say and hold it."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return
    limit = int(pages.read_text().split()[0]) * resource.getpagesize() + MEMORY
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
