"""Chat templates, rendered in a process of their own: a template is a program that comes with a model.

Jinja's sandbox keeps it from files and from Python, but not from loops without end. Templates find what Transformers
gives them: the same filters and functions, loop controls, and the block `generation`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from anybit.checkpoint.files import cause
from anybit.checkpoint.tokenizer import check_unicode
from anybit.config import Json
from anybit.errors import InputError

SECONDS = 2  # of a processor that a template may take
PATIENCE = 20.0  # seconds of a clock: the machine may be busy
MEMORY = 512 << 20  # bytes that it may take, beyond those of this process
LONGEST = 4 << 20  # bytes of what it makes: a tokenizer takes a hundred times as much

_GOOD, _BAD = b"+", b"-"  # before what a child sends: a text, or what went wrong


def template_of(source: str, tokenizer: Any, tools: Sequence[Json] | None = None) -> str:
    """The chat template of a tokenizer; where it has one for tools, that one for these.

    Raises:
        InputError: there are several, and none is the default.
    """
    try:
        return str(tokenizer.get_chat_template(tools=tools))
    except ValueError as error:
        raise _bad(source, cause(error)) from error


def render(
    source: str,
    tokenizer: Any,
    messages: Sequence[Json],
    tools: Sequence[Json] | None = None,
    more: Json | None = None,
) -> str:
    """A conversation as text, ready for the model's answer.

    Args:
        source: the model, as errors name it.
        tokenizer: has the template.
        messages: with `role`, `content` and whatever else the template takes.
        tools: functions that the model may call, as OpenAI writes them.
        more: other variables of the template.

    Raises:
        InputError: a text that is no Unicode; a template that the sandbox refuses, that fails, or that takes too much
            time or memory.
    """
    for message in messages:
        check_unicode(message["content"])  # which says where
    check_unicode(json.dumps([messages, tools, more], ensure_ascii=False))
    variables = {
        "documents": None,
        **(more or {}),
        **tokenizer.special_tokens_map,
        "messages": list(messages),
        "tools": tools and list(tools),
        "add_generation_prompt": True,
    }
    given = template_of(source, tokenizer, tools), variables
    context = multiprocessing.get_context("fork")  # at once
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_render, args=(sender, *given), daemon=True)
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


def _render(sender: Connection, template: str, variables: Json) -> None:
    """In the child: send the text, or what went wrong."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is for the parent
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    _limit_memory()
    try:
        answer = _GOOD + _environment().from_string(template).render(variables).encode()
    except Exception as error:  # whatever a template raises, MemoryError and RecursionError among it
        answer = _BAD + f"{type(error).__name__}: {cause(error)}".encode(errors="replace")
    with suppress(OSError):  # the parent has given up
        sender.send_bytes(answer)
    os._exit(0)  # nothing of the parent's is to be closed twice


class _Generation(Extension):
    """The block `generation`, which marks what the model has said: here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **how: Any) -> str:
    """Jinja's own filter would write "<" and the like for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _limit_memory() -> None:
    """Let the process take no more than it has now and `MEMORY`, where the system can say and hold it."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return
    limit = int(pages.read_text().split()[0]) * resource.getpagesize() + MEMORY
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
