"""From the engine's thread to the client: one queue for each HTTP request, read as events or gathered into one answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sejax.serve.errors import ServerFault
from sejax.serve.metrics import Meters
from sejax.serve.request import Delta, EngineLike, Prompt, Sampling, Usage

TICK = 1.0  # seconds: how often a silent answer looks whether the engine still lives


class Answers:
    """The answers to one HTTP request: one engine request for each prompt, all into one queue.

    `close` cancels what has not ended; call it whatever happens. began: when the HTTP request came (time.monotonic); streams:
    whether pieces are passed on as they come.
    """

    def __init__(self, engine: EngineLike, meters: Meters, prompts: list[tuple[Prompt, Sampling]], began: float, streams: bool = True):
        self.engine, self.meters, self.began = engine, meters, began
        self.queue: asyncio.Queue[tuple[int, float, Delta]] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        self.open: dict[int, int] = {}  # choice -> id of the engine's request
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.usage = Usage(0, 0, 0)
        try:
            for index, (prompt, sampling) in enumerate(prompts):
                self.open[index] = engine.submit(prompt, sampling, lambda delta, index=index: self._sink(index, delta), streams)
        except BaseException:
            self.close()
            raise

    def _sink(self, index: int, delta: Delta) -> None:
        """Runs in the engine's thread. A closed loop (the server is gone) is not the engine's trouble."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.queue.put_nowait, (index, time.monotonic(), delta))

    async def read(self, tick: float = TICK) -> AsyncIterator[tuple[int, Delta] | None]:
        """(choice, piece) until every choice has ended; None after each `tick` seconds of silence. Raises ServerFault."""
        while self.open:
            try:
                async with asyncio.timeout(tick):
                    index, now, delta = await self.queue.get()
            except TimeoutError:
                if self.engine.failure is not None:
                    raise ServerFault(f"The engine stopped: {self.engine.failure}") from None
                yield None
                continue
            self._measure(index, now, delta)
            if delta.finish is not None:
                self.open.pop(index)
            if delta.finish == "error":
                raise ServerFault(delta.error or "The answer broke off.")
            if delta.finish == "cancelled":
                raise ServerFault("The request was cancelled by the server.", 503)
            yield index, delta

    def _measure(self, index: int, now: float, delta: Delta) -> None:
        count = len(delta.ids)
        if count:
            if index not in self.first:
                self.first[index] = now
                self.meters.first.observe(now - self.began)
                count -= 1
            for _ in range(count):
                self.meters.gap.observe((now - self.last.get(index, now)) / len(delta.ids))
            self.last[index] = now
        if delta.usage is not None:
            self.usage = self.usage.plus(delta.usage)
            if delta.finish in ("stop", "length"):
                self.meters.ended(self.began, self.first.get(index), now, delta.usage)

    def close(self) -> None:
        for id in self.open.values():
            self.engine.cancel(id)
        self.open.clear()


async def unless_gone[T](work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """The result of `work`, or None, with `work` cancelled, as soon as the client has left. The body must have been read."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = (asyncio.ensure_future(work), asyncio.ensure_future(gone()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events: the headers leave at once; `answers` are closed however the stream ends."""

    media_type = "text/event-stream"

    def __init__(self, answers: Answers, frames: AsyncIterator[bytes], headers: dict[str, str]):
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self.answers, self.frames = answers, frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def pump() -> None:
            async for frame in self.frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless_gone(pump(), receive)
        finally:
            self.answers.close()
