"""Who may talk to the server: checked before anything else looks at a request.

Without an API key the server trusts this machine's programs, but not the web pages that its
browser shows: a page may send requests to 127.0.0.1, under its own Origin or, by DNS rebinding,
under its own Host name.
"""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from launch.server.errors import ApiError

# The page itself holds nothing; it asks for the key and sends it with every request it makes.
OPEN_PATHS = frozenset(("/", "/health", "/favicon.ico"))


class Guard:
    """ASGI middleware. `loopback` says whether the server listens to this machine only."""

    def __init__(self, app: ASGIApp, api_key: str, loopback: bool) -> None:
        self._app = app
        self._key = api_key.encode()
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(Headers(scope=scope), scope["path"])
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, headers: Headers, path: str) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._loopback and not _is_local(host):
            raise ApiError(403, f"this server answers to localhost, not to {host!r}")
        if origin is not None and origin.partition("://")[2] != host:
            raise ApiError(403, f"a page of {origin!r} may not use this server")
        if self._key and path not in OPEN_PATHS and not self._knows_key(headers):
            raise ApiError(
                401,
                "a valid API key is needed: send it as Authorization: Bearer …",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _knows_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Compared in constant time, so that its duration tells nothing.
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._key)


def _is_local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost":
            return True
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
