"""A request body to what the engine takes. Runs in a thread: a large prompt must not hold up other clients."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

from sejax.serve import chat, errors, schemas
from sejax.serve.request import EngineLike, InvalidRequest, Prompt, Sampling

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

Kind = Literal["chat", "completion"]
Encoded = tuple[str, tuple[int, ...]]


class Job(NamedTuple):
    """One HTTP request, checked and encoded: a prompt for each choice."""

    kind: Kind
    prompts: list[tuple[Prompt, Sampling]]
    stream: bool
    include_usage: bool


class Preparer:
    """Bodies to jobs; holds what is the same for all requests. What is wrong with a body is an InvalidRequest.

    bytes_per_token: a text of more than that times the context is refused without being encoded (one token may stand for
    more, but not on average over a whole context). force: the test hook `force_tokens` is honoured.
    """

    def __init__(self, engine: EngineLike, names: tuple[str, ...], bytes_per_token: int = 16, force: bool = False):
        self.engine, self.names, self.bytes_per_token, self.force = engine, names, bytes_per_token, force
        self.tokenizer = engine.model.tokenizer
        self.specials = chat.special_texts(self.tokenizer)
        bos = self.tokenizer.bos_id if getattr(self.tokenizer, "adds_bos", False) else None
        self.bos = "" if bos is None else self.tokenizer.decode([bos])

    def chat(self, body: bytes, session: str | None) -> Job:
        """session: from the headers; a name in the body comes first."""
        raw = parse_json(body)
        request = schemas.parse(schemas.ChatRequest, raw)
        self._check_model(request.model)
        tools = request.tools or []
        if len(tools) > schemas.MAX_TOOLS or not all(isinstance(t, dict) for t in tools):
            raise InvalidRequest(f"tools must be a list of at most {schemas.MAX_TOOLS} objects.", "tools")
        extra = request.chat_template_kwargs or {}
        if reserved := extra.keys() & {"messages", "tools", "add_generation_prompt"}:
            raise InvalidRequest(f"chat_template_kwargs may not hold {min(reserved)}; use the field of that name.", "chat_template_kwargs")
        generation = request.add_generation_prompt is not False
        text = chat.render(self.tokenizer, request.messages, tools, add_generation_prompt=generation, **extra)
        return self._job("chat", request, raw, session, [self._encode(text, "messages", request.cap())])

    def completion(self, body: bytes, session: str | None) -> Job:
        """A begin-of-text token is put before a text that lacks it, if the tokenizer wants one; ids are taken as they are."""
        raw = parse_json(body)
        request = schemas.parse(schemas.CompletionRequest, raw)
        self._check_model(request.model)
        texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        if not isinstance(texts, list) or not texts:
            raise InvalidRequest("prompt must be a text, a list of texts or a list of token ids, and not empty.", "prompt")
        if not isinstance(texts[0], str):
            ids = schemas.token_ids(texts, self.tokenizer.vocab_size, "prompt")
            self._room(len(ids), request.cap(), "prompt")
            return self._job("completion", request, raw, session, [(self.tokenizer.decode(ids), ids)])
        if len(texts) > schemas.MAX_PROMPTS or not all(isinstance(t, str) for t in texts):
            raise InvalidRequest(f"prompt must be a list of at most {schemas.MAX_PROMPTS} texts, or of token ids alone.", "prompt")
        begun = [t if t.startswith(self.bos) else self.bos + t for t in map(chat.clean, texts)]
        return self._job("completion", request, raw, session, [self._encode(t, "prompt", request.cap()) for t in begun])

    def _job(self, kind: Kind, request: schemas.Request, raw: dict[str, Any], session: str | None, prompts: list[Encoded]) -> Job:
        session = request.session_id or request.prompt_cache_key or session or None
        if session and len(session) > schemas.SESSION_CHARS:
            raise InvalidRequest(f"session_id must have at most {schemas.SESSION_CHARS} characters.", "session_id")
        param, vocab, jobs = ("messages" if kind == "chat" else "prompt"), self.tokenizer.vocab_size, []
        force = schemas.token_ids(raw.get("force_tokens") or [], vocab, "force_tokens") if self.force else ()
        for text, ids in prompts:
            if not ids:
                raise InvalidRequest(f"{param} must give at least one token.", param)
            room, cap = self._room(len(ids), request.cap(), param), request.cap()
            tokens = cap or (room if kind == "chat" else min(room, COMPLETION_TOKENS))
            jobs.append((Prompt(ids, text, session), request.sampling(tokens, vocab, force)))
        return Job(kind, jobs, bool(request.stream), request.include_usage())

    def _encode(self, text: str, param: str, cap: int | None) -> Encoded:
        if len(text) > self.bytes_per_token * self.engine.max_len:  # characters: never more than bytes
            raise errors.too_long(self.engine.max_len, len(text) // self.bytes_per_token, cap or 1, param)
        return text, chat.encode(self.tokenizer, text, self.engine.marks(), self.specials)

    def _room(self, prompt: int, cap: int | None, param: str) -> int:
        room = self.engine.max_len - prompt
        if room < (cap or 1):
            raise errors.too_long(self.engine.max_len, prompt, cap or 1, param)
        return room

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            text = f"The model {chat.clean(name)!r} is not served here; use {' or '.join(map(repr, self.names))}."
            raise InvalidRequest(text, "model", "model_not_found", 404)


def parse_json(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not UTF-8 (byte {error.start}).") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None
