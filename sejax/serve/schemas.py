"""What requests and responses look like (OpenAI's shapes): checked here, shown in /docs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from sejax.serve.chat import clean
from sejax.serve.request import InvalidRequest, Sampling

MAX_PROMPTS, MAX_TOOLS, MAX_STOP_IDS, STOP_CHARS, SESSION_CHARS = 128, 128, 128, 1024, 512

_LATER = "This version does not implement it; leave it out."
_SINGLE = "This version gives one answer per request; send several requests (their common prompt is reused)."
_TEXT = 'This version does not constrain the output; leave it out, or use {"type": "text"} and say the format in the prompt.'
_TOOLS = 'This version does not force tool calls; use "auto" or "none".'
_LOGPROBS = "This version does not return log-probabilities; leave it out."

# A field that would change the answer is refused unless it asks for what happens anyway: field -> (neutral values, remedy).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), _SINGLE),
    "best_of": ((1,), _SINGLE),
    "logprobs": ((False,), _LOGPROBS),
    "top_logprobs": ((0,), _LOGPROBS),
    "prompt_logprobs": ((False,), _LOGPROBS),
    "echo": ((False,), "This version does not repeat the prompt; join it to the answer yourself."),
    "suffix": (("",), "This version only continues a prompt; leave it out."),
    "logit_bias": (({},), _LATER),
    "presence_penalty": ((0,), _LATER),
    "frequency_penalty": ((0,), _LATER),
    "repetition_penalty": ((1,), _LATER),
    "min_tokens": ((0,), _LATER),
    "response_format": (({"type": "text"},), _TEXT),
    "structured_outputs": (({},), _TEXT),
    "guided_json": ((), _TEXT),
    "guided_regex": ((), _TEXT),
    "grammar": (("",), _TEXT),
    "tool_choice": (("auto", "none"), _TOOLS),
    "functions": (([],), "It is the old form; send tools instead."),
    "function_call": (("auto", "none"), _TOOLS),
    "chat_template": ((), "The model's own template is used; send a ready prompt to /v1/completions for another."),
    "continue_final_message": ((False,), _LATER),
    "cache_salt": ((), "This version shares reuse among all clients; run one server per tenant."),
    "kv_method": ((), "The method is chosen when the server starts (sejax serve --method)."),
    "kv_budget": ((), "The method is chosen when the server starts (sejax serve --method)."),
}


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Raises InvalidRequest for a field that this version would have to ignore although it changes the answer."""
    for name in body.keys() & _REFUSED.keys():
        value, (neutral, remedy) = body[name], _REFUSED[name]
        if value is not None and not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral):
            shown = clean(repr(value))
            raise InvalidRequest(f"{name}={shown if len(shown) <= 60 else shown[:57] + '...'} is not supported. {remedy}", name)


_Stop = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 4}]})
_Ids = WithJsonSchema({"type": "array", "items": {"type": "integer"}})
_Prompt = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}]})


class Request(BaseModel):
    """Fields of both kinds of request. null means absent; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str | None = Field(None, description="the served model (see /v1/models); absent: that one")
    stream: bool | None = Field(None, description="answer as server-sent events, ended by [DONE]")
    stream_options: dict[str, Any] | None = Field(None, description='{"include_usage": true}: one more chunk with the usage')
    max_tokens: int | None = Field(None, ge=1, description="absent: rest of the context for chat, 16 for completions")
    temperature: float | None = Field(None, description="0 is greedy; absent: 1")
    top_p: float | None = Field(None, description="absent: 1")
    top_k: int | None = Field(None, description="0 or -1: off")
    min_p: float | None = Field(None, description="absent: 0")
    seed: int | None = None
    stop: Annotated[Any, _Stop] = Field(None, description="at most 4 strings; the answer ends before the first of them")
    stop_token_ids: Annotated[Any, _Ids] = None
    ignore_eos: bool | None = None
    session_id: str | None = Field(None, description="names the conversation; also: prompt_cache_key, headers x-session-id, session-id")
    prompt_cache_key: str | None = None

    def include_usage(self) -> bool:
        """Only a true `include_usage` of a stream asks for the usage chunk, not the presence of stream_options."""
        value = (self.stream_options or {}).get("include_usage")
        if value is not None and not isinstance(value, bool):
            raise InvalidRequest("stream_options.include_usage must be true or false.", "stream_options.include_usage")
        return bool(value)

    def cap(self) -> int | None:
        return self.max_tokens

    def sampling(self, max_tokens: int, vocab: int, force: tuple[int, ...] = ()) -> Sampling:
        """vocab: ids must be below it. Raises InvalidRequest naming the field."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop if self.stop is not None else []
        if not isinstance(stop, list) or not all(isinstance(s, str) and len(s) <= STOP_CHARS for s in stop):
            raise InvalidRequest(f"stop must be a string or a list of at most 4, each of at most {STOP_CHARS} characters.", "stop")
        stop_ids = token_ids(self.stop_token_ids if self.stop_token_ids is not None else [], vocab, "stop_token_ids")
        if len(stop_ids) > MAX_STOP_IDS:
            raise InvalidRequest(f"stop_token_ids holds {len(stop_ids)} ids; at most {MAX_STOP_IDS} are allowed.", "stop_token_ids")
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=0 if self.top_k is None else self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=0.0 if self.min_p is None else self.min_p,
            seed=self.seed,
            stop=tuple(clean(s) for s in stop),
            stop_ids=stop_ids,
            ignore_eos=bool(self.ignore_eos),
            force_tokens=force,
        )


class ChatRequest(Request):
    model_config = ConfigDict(json_schema_extra={"example": {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}})

    messages: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}, "minItems": 1})]
    tools: list[Any] | None = Field(None, description="function tools, passed to the chat template")
    max_completion_tokens: int | None = Field(None, ge=1, description="wins over max_tokens")
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def cap(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Request):
    model_config = ConfigDict(json_schema_extra={"example": {"prompt": "Once upon a time", "max_tokens": 32}})

    prompt: Annotated[Any, _Prompt] = Field(description="a text, a list of texts (one choice each) or a list of token ids")


def parse[R: Request](kind: type[R], body: Any) -> R:
    """A checked request. Raises InvalidRequest with a sentence that names the field."""
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be a JSON object.")
    refuse_unsupported(body)
    try:
        return kind.model_validate(body)
    except ValidationError as failure:
        first = failure.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise InvalidRequest(f"{name} is required.", name) from None
        shown = clean(repr(first["input"]))
        what = first["msg"].replace("Input should", f"{name} should", 1)
        raise InvalidRequest(f"{what}, not {shown if len(shown) <= 60 else shown[:57] + '...'}.", name) from None


def token_ids(value: Any, vocab: int, name: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} must be a list of token ids.", name)
    for id in value:
        if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < vocab:
            raise InvalidRequest(f"{name} must hold whole numbers from 0 to {vocab - 1}, not {clean(repr(id))[:60]}.", name)
    return tuple(value)


class CachedTokens(BaseModel):
    cached_tokens: int = Field(description="prompt tokens whose state was reused instead of computed")


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    kept_tokens: float = Field(description="cache rows held at the end, mean over layers and heads")


class Message(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int
    message: Message
    finish_reason: Literal["stop", "length"]


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class CompletionChoice(BaseModel):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    method: str = Field(description="the KV-cache method")


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail
