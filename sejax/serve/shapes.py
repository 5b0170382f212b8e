"""Answers in OpenAI's shapes: whole, or as the frames of an event stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from sejax.serve.errors import ServerFault, dumps, error_body
from sejax.serve.prepare import Job
from sejax.serve.request import Delta, Usage
from sejax.serve.stream import TICK, Answers


def usage_body(usage: Usage, choices: int = 1) -> dict[str, Any]:
    """choices: answers summed in `usage`; kept is their mean."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "kept_tokens": round(usage.kept / choices, 1),
    }


class Shape:
    """The parts that chat and plain completions write differently; `id` also becomes the x-request-id."""

    def __init__(self, job: Job, model: str):
        self.job, self.chat = job, job.kind == "chat"
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex
        self.object = "chat.completion" if self.chat else "text_completion"
        self.head = {"id": self.id, "object": self.object, "created": int(time.time()), "model": model}

    def frame(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self.chat else self.object
        return b"data: " + dumps({**self.head, "object": kind, "choices": choices, **more}) + b"\n\n"

    def piece(self, index: int, text: str, finish: str | None = None, role: bool = False) -> dict[str, Any]:
        if not self.chat:
            return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
        delta = {**({"role": "assistant", "content": ""} if role else {}), **({"content": text} if text else {})}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}

    def _event(self, index: int, delta: Delta, begun: set[int]) -> bytes:
        """Frames of one piece; none while its text is held back. begun: choices whose role was told."""
        frame = b""
        if delta.text:
            frame = self.frame([self.piece(index, delta.text, role=index not in begun)])
            begun.add(index)
        if delta.finish is not None:
            frame += self.frame([self.piece(index, "", delta.finish, role=index not in begun)])
        return frame

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """The complete answer. Raises ServerFault."""
        texts: list[list[str]] = [[] for _ in self.job.prompts]
        ends: list[str | None] = [None] * len(texts)
        async for item in answers.read():
            if item is not None:
                index, delta = item
                texts[index].append(delta.text)
                ends[index] = delta.finish
        choices = []
        for index, parts in enumerate(texts):
            text = "".join(parts)
            body = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
            choices.append({"index": index, **body, "logprobs": None, "finish_reason": ends[index]})
        return {**self.head, "choices": choices, "usage": usage_body(answers.usage, len(texts))}

    async def frames(self, answers: Answers, ping: float) -> AsyncIterator[bytes]:
        """Events to [DONE]. A comment after `ping` seconds of silence keeps proxies and clients waiting; a fault is an event."""
        begun: set[int] = set()
        sent = time.monotonic()
        try:
            async for item in answers.read(min(ping, TICK)):
                frame = b"" if item is None else self._event(item[0], item[1], begun)
                if not frame and time.monotonic() - sent >= ping:
                    frame = b": ping\n\n"
                if frame:
                    yield frame
                    sent = time.monotonic()
            if self.job.include_usage:
                yield self.frame([], usage=usage_body(answers.usage, len(self.job.prompts)))
        except ServerFault as fault:
            yield b"data: " + dumps(error_body(str(fault), fault.status)) + b"\n\n"
        yield b"data: [DONE]\n\n"
