"""Who may ask, from where, and how much: checked before anything is read."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from anybit.serve.errors import Refused
from anybit.serve.http.static import FILES

OPEN = (*FILES, "/health")  # that need no key


@dataclass(frozen=True)
class Guard:
    """What requests are checked for.

    Args:
        keys: any of them is asked for, each as `settings.is_key` has it; none: nobody is asked.
        hosts: names that the server may be called by, besides addresses, localhost and this machine's name.
        origins: of pages elsewhere whose scripts may ask.
    """

    keys: Sequence[str] = ()
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()

    def check(self, path: str, headers: Headers) -> str:
        """Whose a request is: a name for its key, which is not the key; "" without keys.

        Raises:
            Refused: 403, 401.
        """
        self._check_host(headers.get("host", ""))
        self._check_origin(headers)
        if not self.keys or path in OPEN:
            return ""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer] if scheme.lower() == "bearer" else []
        given.append(headers.get("x-api-key", ""))  # as Anthropic's clients send it
        if not any(given):
            raise Refused(
                401,
                "an API key is needed: send it as Authorization: Bearer KEY, or as x-api-key: KEY",
                "missing_api_key",
            )
        found = [
            key
            for key in self.keys
            for one in given
            if hmac.compare_digest(one.strip().encode(), key.encode())
        ]
        if not found:
            raise Refused(401, "the API key is none of this server's", "invalid_api_key")
        return hashlib.sha256(found[0].encode()).hexdigest()[:16]

    def _check_host(self, host: str) -> None:
        """Refuse names that a page elsewhere could have let point here (DNS rebinding)."""
        name = (urlsplit(f"//{host}").hostname or "") if _sound(host) else ""
        if name in ("localhost", socket.gethostname().lower(), *(known.lower() for known in self.hosts)):
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise Refused(
                403,
                f"this server is not known as {host!r:.100}: start it with --allow-host",
                "host_not_allowed",
            ) from None

    def _check_origin(self, headers: Headers) -> None:
        """Refuse scripts of pages elsewhere."""
        origin = headers.get("origin")
        if origin is None or origin in self.origins or "*" in self.origins:
            return
        if urlsplit(origin).netloc != headers.get("host") if _sound(origin) else True:
            raise Refused(
                403,
                f"pages from {origin!r:.100} may not ask here: start with --allow-origin",
                "origin_not_allowed",
            )


def _sound(url: str) -> bool:
    """Whether Python can take a host or an origin apart."""
    try:
        return bool(urlsplit(url if "//" in url else f"//{url}").netloc)
    except ValueError:
        return False
