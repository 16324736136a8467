"""Fields of a JSON object from outside: each has a type, and none is ignored without being known."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from anybit.config import Json
from anybit.serve.errors import BadField, Refused

MOST_INSIDE = (
    50_000  # objects and lists of a body: for a million Python takes 0.2 s, and nothing else runs then
)
# Never goes back, and a text that does not end takes all the rest: linear in the body, whatever it is.
_TEXTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def read_json(body: bytes) -> Json:
    """A body's object.

    Raises:
        Refused: it is none, or has too much inside.
    """
    if _begun(body) > MOST_INSIDE and _begun(_TEXTS.sub(b"", body)) > MOST_INSIDE:
        raise Refused(400, f"the body has more than {MOST_INSIDE} objects and lists", "too_many_objects")
    try:
        values = json.loads(body, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refused(400, f"the body is no JSON ({said:.200})", "invalid_json") from None
    if not isinstance(values, dict):
        raise Refused(400, f"the body is {_named(values)}, expected a JSON object", "invalid_json")
    return values


def _begun(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _finite(number: str) -> float:
    found = float(number)
    if not math.isfinite(found):
        raise ValueError(f"{number:.20} is too large a number")
    return found


class Fields:
    """Takes the fields of an object one by one; null counts as left out.

    Args:
        values: the object.
        whose: comes before names in errors, such as "stream_options.".
    """

    def __init__(self, values: Any, whose: str = "") -> None:
        if not isinstance(values, dict):
            raise BadField(whose.rstrip("."), f"{whose.rstrip('.')} is {_named(values)}, expected an object")
        self._left = {name: value for name, value in values.items() if value is not None}
        self._whose = whose

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def any(self, name: str, default: Any = None) -> Any:
        """A field that whoever uses it checks."""
        return self._left.pop(name, default)

    def text(self, name: str, default: str | None = None) -> str | None:
        return self._typed(name, default, str, "a string")

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self._typed(name, default, bool, "true or false"))

    def whole(self, name: str, default: int | None, least: int, most: int) -> int | None:
        """A whole number within bounds."""
        value = self._left.pop(name, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.bad(name, value, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        """A number within bounds."""
        value = self._left.pop(name, None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.bad(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def texts(self, name: str, most: int, longest: int, least: int = 1) -> tuple[str, ...] | None:
        """A string or a list of some, none of them empty; None: it is not there."""
        value = self._left.pop(name, None)
        if value is None:
            return None
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list):
            raise self.bad(name, value, "a string or a list of strings")
        if not least <= len(found) <= most:
            raise BadField(name, f"{name} has {len(found)} strings, expected {least} to {most}")
        for item in found:
            if not isinstance(item, str) or not 0 < len(item) <= longest:
                raise self.bad(name, item, f"strings of 1 to {longest} characters")
        return tuple(found)

    def inside(self, name: str) -> Fields | None:
        """A field that is an object itself; None: it is not there."""
        value = self._left.pop(name, None)
        return None if value is None else Fields(value, f"{self._whose}{name}.")

    def accept(self, *names: str) -> None:
        """Fields that change nothing of an answer."""
        for name in names:
            self._left.pop(name, None)

    def only(self, name: str, *values: Any) -> None:
        """A field that may be there, as long as it asks for nothing that is not served."""
        value = self._left.pop(name, values[0])
        if value not in values or type(value) not in map(type, values):
            there = " or ".join(json.dumps(value) for value in values)
            raise BadField(
                self._whose + name, f"{self._whose}{name} is {_named(value)}; this server has only {there}"
            )

    def finish(self) -> None:
        """Refuse what was not taken.

        Raises:
            BadField: with the first of it.
        """
        for name in self._left:
            param = f"{self._whose}{name}"[:100]
            raise BadField(param, f"{param!r} is no parameter of this server: leave it out")

    def bad(self, name: str, value: Any, expected: str) -> BadField:
        param = self._whose + name
        return BadField(param, f"{param} is {_named(value)}, expected {expected}")

    def _typed(self, name: str, default: Any, kind: type, words: str) -> Any:
        value = self._left.pop(name, default)
        if value is not default and not isinstance(value, kind):
            raise self.bad(name, value, words)
        return value


def _named(value: Any) -> str:
    """A value in an error: what it is, or where it is large, of what type."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    shown = json.dumps(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
