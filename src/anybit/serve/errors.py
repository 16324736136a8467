"""What the server answers instead of what was asked for, in the words of OpenAI's API."""

from __future__ import annotations

from anybit.config import Json
from anybit.errors import InputError, printable

RETRY_SECONDS = 1  # after which a busy server may be asked again
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class Refused(Exception):
    """An answer that is no 200."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(RETRY_SECONDS)} if self.status in (429, 503) else {}

    def body(self) -> Json:
        kind = "server_error" if self.status >= 500 else KINDS.get(self.status, "invalid_request_error")
        # Requests may name halves of surrogate pairs, which have no form in UTF-8.
        param = None if self.param is None else printable(self.param)
        return {
            "error": {"message": printable(self.message), "type": kind, "param": param, "code": self.code}
        }


class Busy(Exception):
    """The queue is full: the same request may be taken later."""


class Closing(Exception):
    """The server takes no more requests."""


class EngineFault(Exception):
    """The model fails whatever is asked of it: its weights are damaged."""


class BadField(InputError):
    """A field of a request that cannot be as it is."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class TooLong(InputError):
    """A prompt that the context does not hold."""

    code = "context_length_exceeded"


def refused(error: Exception) -> Refused:
    """The answer to a request that raised something."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, Busy):
        return Refused(429, f"{error}: try again later", "queue_full")
    if isinstance(error, Closing):
        return Refused(503, str(error), "stopping")
    if isinstance(error, EngineFault):
        return Refused(500, str(error), "engine_fault")
    if isinstance(error, InputError):
        return Refused(400, str(error), getattr(error, "code", None), getattr(error, "param", None))
    return Refused(500, f"{type(error).__name__}: the server has a defect; its log says more")
