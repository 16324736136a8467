"""Every method, in the order in which help and reports list them. A new one is a file here, and a line in this table.

The methods' files need neither torch nor Transformers until something is quantized: the command line is made of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from anybit.config import Options, flag_of
from anybit.errors import InputError
from anybit.methods import (
    any_precision,
    anybit,
    atom,
    awq,
    cmpq,
    gptq,
    llm_mq,
    mixllm,
    rtn,
    smoothquant,
    squeezellm,
    two_four_sixteen,
)
from anybit.methods.method import Method

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        anybit.METHOD,
        rtn.METHOD,
        gptq.METHOD,
        awq.METHOD,
        smoothquant.METHOD,
        mixllm.METHOD,
        atom.METHOD,
        llm_mq.METHOD,
        two_four_sixteen.METHOD,
        squeezellm.METHOD,
        any_precision.METHOD,
        cmpq.METHOD,
    )
}
DEFAULT = anybit.METHOD


def find(name: str) -> Method:
    """The method of a name.

    Raises:
        InputError: no such method, with the names there are.
    """
    if name not in METHODS:
        raise InputError(f"unknown method {name!r}: expected one of {', '.join(METHODS)}")
    return METHODS[name]


def options(name: str, **given: Any) -> Options:
    """Options of a method by name.

    Raises:
        InputError: no such method, an option that it has no use for, or a value that is out of place.
    """
    check_names(name, given)
    return find(name).options(**given)


def check_names(name: str, given: Iterable[str]) -> None:
    """Refuse options that a method does not have.

    Raises:
        InputError: no such method, or an option that it has no use for, with the methods that have one.
    """
    known = {item.name for item in fields(find(name).options)}
    for unknown in sorted({*given} - known):
        others = [m.name for m in METHODS.values() if unknown in {i.name for i in fields(m.options)}]
        if others:
            raise InputError(
                f"{unknown} ({flag_of(unknown)}) would be ignored: it is for {', '.join(others)}; {name} has no use "
                "for it"
            )
        raise InputError(f"{unknown!r} is no option of {name}: there are {', '.join(sorted(known))}")


def changed(options_: Options) -> dict[str, Any]:
    """The options that the method would not choose by itself at this width; none of them is open."""
    plain = type(options_)()
    sized = any(getattr(plain, name) is not None for name in plain.sized_by)
    usual = (plain if sized else plain.with_bits(options_.bits or plain.default_bits)).resolve()
    return {
        item.name: getattr(options_, item.name)
        for item in fields(options_)
        if getattr(options_, item.name) not in (item.default, getattr(usual, item.name))
    }


__all__ = ["DEFAULT", "METHODS", "Method", "changed", "check_names", "find", "options"]
