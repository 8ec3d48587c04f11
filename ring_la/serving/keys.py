"""API keys: who may ask, told by a bearer token."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import ArgumentError
from .answers import error

OPEN = ("/", "/health")
"""Paths that need no key: the page, which holds nothing of anybody's, and what a load balancer asks."""


def parsed(given: Iterable[str], environment: str | None) -> tuple[str, ...]:
    """Keys from a command's options, or else from the environment's, between commas.

    Raises:
        ArgumentError: one of them is none that a header can hold.
    """
    found = [key.strip() for key in given] or [key.strip() for key in (environment or "").split(",") if key.strip()]
    if any(not key or not key.isascii() or not key.isprintable() for key in found):
        raise ArgumentError("api_key", "keys of printable ASCII characters, none empty", "another one")
    return tuple(found)


class Keys:
    """Lets through who has a key. The key's short name goes along in the request's state, as `key`.

    Args:
        app: what is guarded. keys: those that open it; none: it is open.
        refused: hears of those who have none.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], refused: Callable[[HTTPConnection], None]) -> None:
        self._app, self._digests = app, [hashlib.sha256(key.encode()).digest() for key in keys]
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        scheme, _, key = connection.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        # each is compared, in a time that does not depend on where they differ
        right = sum(hmac.compare_digest(digest, known) for known in self._digests)
        if right and scheme.lower() == "bearer":
            scope.setdefault("state", {})["key"] = digest.hex()[:8]
            await self._app(scope, receive, send)
            return
        self._refused(connection)
        what = "no API key was given" if not key else "the API key is not one of this server's"
        said = error(f"{what}: Authorization: Bearer KEY", "invalid_request_error", code="invalid_api_key")
        await JSONResponse(said, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
