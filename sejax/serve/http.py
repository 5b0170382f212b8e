"""The HTTP server: OpenAI's chat and completions endpoints, model list, health, metrics, API docs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.security import HTTPBearer
from starlette.middleware import Middleware
from starlette.responses import Response

from sejax.serve import errors, schemas
from sejax.serve.access import KeyCheck, read_body
from sejax.serve.metrics import CONTENT_TYPE, Meters
from sejax.serve.prepare import Job, Preparer
from sejax.serve.request import EngineLike, InvalidRequest
from sejax.serve.shapes import Shape
from sejax.serve.stream import Answers, EventStream, unless_gone

log = logging.getLogger("sejax")


@dataclasses.dataclass(frozen=True)
class Options:
    """aliases: further names the model answers to. api_key: None lets everybody in; public_metrics: /metrics needs none.

    body_limit: bytes of a request, None = 32 for each token of context, at least 8 MiB. bytes_per_token: see Preparer.
    Seconds: ping, silence before a keep-alive comment; stall, a step loop that stands still this long with work is not ready;
    drain, given to running requests at shutdown. force_tokens: honour this test hook in request bodies.
    """

    aliases: tuple[str, ...] = ()
    api_key: str | None = None
    public_metrics: bool = False
    body_limit: int | None = None
    bytes_per_token: int = 16
    ping: float = 5.0
    stall: float = 60.0
    drain: float = 10.0
    force_tokens: bool = False


class Service:
    """What the routes share."""

    def __init__(self, engine: EngineLike, options: Options):
        self.engine, self.options = engine, options
        self.names = (engine.name, *options.aliases)
        self.meters = Meters(engine)
        self.created = int(time.time())
        self.start_failure: str | None = None
        self.body_limit = options.body_limit or max(8 << 20, 32 * engine.max_len)
        self._preparer: Preparer | None = None
        self._closing: asyncio.Future[None] | None = None

    @property
    def preparer(self) -> Preparer:
        """Made when first needed: the tokenizer may load together with the engine."""
        if self._preparer is None:
            self._preparer = Preparer(self.engine, self.names, self.options.bytes_per_token, self.options.force_tokens)
        return self._preparer

    @property
    def failure(self) -> str | None:
        return self.engine.failure or self.start_failure

    def trouble(self) -> str | None:
        """Why no request can be served now."""
        if self.failure:
            return f"The engine stopped: {self.failure}"
        if not self.engine.ready:
            return "The model is still loading or compiling; try again soon."
        return None

    async def close(self) -> None:
        """Once: running answers get `drain` seconds, then the engine cancels them, so that their clients hear why."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(asyncio.to_thread(self.engine.close, self.options.drain))
        await asyncio.shield(self._closing)

    def stalled(self) -> str | None:
        stats = self.engine.stats()
        if stats.running + stats.waiting and stats.step_age > self.options.stall:
            return f"The engine has not moved for {stats.step_age:.0f} s although {stats.running + stats.waiting} requests wait."
        return None

    async def answer(self, request: Request, prepare: Callable[[Preparer, bytes, str | None], Job]) -> Response:
        """One request from its body to its answer. prepare: Preparer.chat or Preparer.completion."""
        began = time.monotonic()
        if trouble := self.trouble():
            raise errors.ServerFault(trouble, 503)
        body = await read_body(request, self.body_limit)
        if body is None:
            return Response(status_code=499)
        session = request.headers.get("x-session-id") or request.headers.get("session-id")
        job = await asyncio.to_thread(lambda: prepare(self.preparer, body, session))
        shape, answers = Shape(job, self.engine.name), Answers(self.engine, self.meters, job.prompts, began, job.stream)
        headers = {"x-request-id": shape.id}
        if job.stream:
            return EventStream(answers, shape.frames(answers, self.options.ping), headers)
        try:
            whole = await unless_gone(shape.whole(answers), request.receive)
        finally:
            answers.close()
        return Response(status_code=499) if whole is None else errors.reply(whole, headers=headers)

    def card(self, name: str) -> dict[str, Any]:
        known = {"id": name, "object": "model", "created": self.created, "owned_by": "sejax"}
        return {**known, "max_model_len": self.engine.max_len, "method": str(self.engine.method)}


def app(engine: EngineLike, options: Options | None = None) -> FastAPI:
    """The application. Its lifespan starts the engine (in a thread: /ready says when it is done) and closes it.

    `app.state.on_failure()`, if set, is called some seconds after the engine died.
    """
    options = options or Options()
    service = Service(engine, options)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = (asyncio.create_task(_start(service)), asyncio.create_task(_watch(service, app)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await service.close()

    public = frozenset({"/health", "/ready", "/health/ready", *(("/metrics",) if options.public_metrics else ())})
    application = FastAPI(
        title="sejax",
        description=f"{engine.name} with the KV-cache method {engine.method}",
        lifespan=lifespan,
        exception_handlers=errors.HANDLERS,
        middleware=[Middleware(KeyCheck, key=options.api_key, public=public)] if options.api_key else [],
        dependencies=[Depends(HTTPBearer(auto_error=False))] if options.api_key else [],
    )
    application.state.service = service
    _routes(application, service)
    return application


def _routes(app: FastAPI, service: Service) -> None:
    failures: dict[int | str, dict[str, Any]] = {"4XX": {"model": schemas.ErrorResponse}, "5XX": {"model": schemas.ErrorResponse}}

    def takes(request: type[schemas.Request], response: type) -> dict[str, Any]:
        body = {"required": True, "content": {"application/json": {"schema": request.model_json_schema()}}}
        return {"openapi_extra": {"requestBody": body}, "responses": {200: {"model": response}, **failures}}

    @app.post("/v1/chat/completions", tags=["answers"], **takes(schemas.ChatRequest, schemas.ChatResponse))
    async def chat_completions(request: Request) -> Response:
        """The assistant's next message."""
        return await service.answer(request, Preparer.chat)

    @app.post("/v1/completions", tags=["answers"], **takes(schemas.CompletionRequest, schemas.CompletionResponse))
    async def completions(request: Request) -> Response:
        """The continuation of a text."""
        return await service.answer(request, Preparer.completion)

    @app.get("/v1/models", tags=["models"], responses={200: {"model": schemas.ModelList}})
    async def models() -> Response:
        return errors.reply({"object": "list", "data": [service.card(name) for name in service.names]})

    @app.get("/v1/models/{name:path}", tags=["models"], responses={200: {"model": schemas.ModelCard}, **failures})
    async def model(name: str) -> Response:
        if name not in service.names:
            raise InvalidRequest(f"The model {name!r} is not served here; see /v1/models.", "model", "model_not_found", 404)
        return errors.reply(service.card(name))

    @app.get("/health", tags=["state"])
    async def health() -> Response:
        """200 as long as the process answers."""
        return errors.reply({"status": "ok"})

    @app.get("/health/ready", tags=["state"], include_in_schema=False)
    @app.get("/ready", tags=["state"])
    async def ready() -> Response:
        """200 when requests are served; 503 while loading, after the engine died, or when it stands still with work to do."""
        trouble = service.trouble() or service.stalled()
        return errors.reply({"status": "ready"}) if trouble is None else errors.error_reply(trouble, 503)

    @app.get("/metrics", tags=["state"])
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(service.meters.text(), media_type=CONTENT_TYPE)


async def _start(service: Service) -> None:
    engine, began = service.engine, time.monotonic()
    try:
        await asyncio.to_thread(engine.start)
        log.info("%s (%s) is ready after %.1f s", engine.name, engine.method, time.monotonic() - began)
    except Exception as error:
        service.start_failure = f"{type(error).__name__}: {error}"
        log.exception("the engine did not start")


async def _watch(service: Service, app: FastAPI) -> None:
    """Ends the process after the engine died: an outer supervisor can restart it, a zombie it cannot."""
    while not service.failure:
        await asyncio.sleep(0.5)
    log.error("%s", service.trouble())
    await asyncio.sleep(5)  # requests in flight get their error, probes a 503
    if on_failure := getattr(app.state, "on_failure", None):
        on_failure()


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets the engine drain while uvicorn waits for the open connections (the lifespan ends only after them)."""
        closing = asyncio.create_task(self.config.app.state.service.close())  # pyright: ignore[reportAttributeAccessIssue]
        await super().shutdown(sockets)
        await closing


def server(
    engine: EngineLike, host: str = "127.0.0.1", port: int = 8000, options: Options | None = None, **uvicorn_options: Any
) -> uvicorn.Server:
    """A uvicorn server, not yet running; it ends by itself some seconds after the engine died."""
    options = options or Options()
    application = app(engine, options)
    config: dict[str, Any] = {
        "timeout_graceful_shutdown": round(options.drain) + 5,
        "timeout_keep_alive": 75,  # longer than clients keep idle connections: else they write into closed ones
        "server_header": False,
        "log_level": "warning",
        **uvicorn_options,
    }
    running = _Server(uvicorn.Config(application, host, port, **config))
    application.state.on_failure = lambda: setattr(running, "should_exit", True)
    return running


def serve(engine: EngineLike, host: str = "127.0.0.1", port: int = 8000, options: Options | None = None, **uvicorn_options: Any) -> None:
    """Serves until a signal; running answers may end first (Options.drain). SystemExit(1) if the engine died.

    uvicorn_options: further arguments of uvicorn.Config, for example ssl_keyfile, ssl_certfile, root_path, uds, log_level.
    """
    logging.basicConfig(format="%(levelname)s:     %(message)s")  # as uvicorn writes
    log.setLevel(logging.INFO)
    running = server(engine, host, port, options, **uvicorn_options)
    running.run()
    if running.config.app.state.service.failure or not running.started:  # pyright: ignore[reportAttributeAccessIssue]
        raise SystemExit(1)
