"""One error body for everything that goes wrong, with a real HTTP status."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from sejax.serve.request import InvalidRequest

log = logging.getLogger("sejax")

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}


class ServerFault(Exception):
    """The request was fine, the server is not: 500 (the answer broke off) or 503 (not ready, shutting down)."""

    def __init__(self, message: str, status: int = 500):
        super().__init__(message)
        self.status = status


def dumps(value: Any) -> bytes:
    """JSON as bytes; a lone surrogate quoted back from a request becomes "?" instead of a fault."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(value), status, headers, "application/json")


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_reply(message: str, status: int, param: str | None = None, code: str | None = None) -> Response:
    return reply(error_body(message, status, param, code), status, _HEADERS.get(status))


def too_long(limit: int, prompt: int, completion: int, param: str) -> InvalidRequest:
    """The words by which agents know that they must shorten the history (WIRE P06)."""
    text = (
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + completion} tokens "
        f"({prompt} in the {param}, {completion} in the completion). Please reduce the length of the {param}."
    )
    return InvalidRequest(text, param, "context_length_exceeded")


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidRequest)
    code = error.code or ("queue_full" if error.status == 429 else None)
    return error_reply(str(error), error.status, error.param, code)


async def _fault(_: Request, error: Exception) -> Response:
    assert isinstance(error, ServerFault)
    return error_reply(str(error), error.status)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {404: f"There is no {request.url.path} here; see /docs.", 405: f"{request.url.path} does not take {request.method}; see /docs."}
    return error_reply(text.get(error.status_code) or error.detail or HTTPStatus(error.status_code).phrase, error.status_code)


async def _unexpected(_: Request, error: Exception) -> Response:
    log.error("unexpected error in a request", exc_info=error)
    return error_reply("Internal error; the server's log says more.", 500)


HANDLERS: dict[Any, Any] = {InvalidRequest: _invalid, ServerFault: _fault, HTTPException: _http, Exception: _unexpected}
