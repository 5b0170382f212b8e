"""Who may ask, and how much at once: the API key and the size of a body."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from sejax.serve.errors import error_reply
from sejax.serve.request import InvalidRequest


class KeyCheck:
    """ASGI middleware: every path outside `public` wants `Authorization: Bearer <key>`; compared in constant time."""

    def __init__(self, app: ASGIApp, key: str, public: frozenset[str]):
        self.app, self.key, self.public = app, key.encode(), public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self.public:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self.key):
                text = "Wrong or missing API key; send the header Authorization: Bearer <key>."
                return await error_reply(text, 401, code="invalid_api_key")(scope, receive, send)
        return await self.app(scope, receive, send)


async def read_body(request: Request, limit: int) -> bytes | None:
    """The body, None if the client left meanwhile.

    Too large by its Content-Length: refused before a byte is read; without one: as soon as it has grown too large.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(int(declared), limit)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(size, limit)
            parts.append(part)
    except ClientDisconnect:
        return None
    return b"".join(parts)


def _too_large(size: int, limit: int) -> InvalidRequest:
    text = f"The prompt is too long: a request body of {size} bytes or more, over {limit}. Please reduce the length of the messages."
    return InvalidRequest(text, None, "request_too_large", 413)
