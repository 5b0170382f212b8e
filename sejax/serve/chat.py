"""Messages to the text of a prompt, and text to ids that continue a held session where one matches."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sejax.serve.request import InvalidRequest, Mark

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def clean(text: str) -> str:
    """Lone surrogates (legal in JSON, not in UTF-8) become U+FFFD."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def flatten(messages: Any, developer: bool = False) -> list[dict[str, Any]]:
    """Messages as templates expect them: content is one string, tool-call arguments are mappings, one leading system message.

    developer: the template knows the role "developer"; else it becomes "system". Raises InvalidRequest naming the message.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least one message.", "messages")
    flat = [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    for message in flat:
        if message["role"] == "developer" and not developer:
            message["role"] = "system"
    lead = next((i for i, m in enumerate(flat) if m["role"] not in ("system", "developer")), len(flat))
    return _merge(flat[:lead]) + flat[lead:]


def render(tokenizer: Any, messages: Any, tools: list[Any] | None = None, **kwargs: Any) -> str:
    """The prompt's text by the model's chat template; what the template refuses is an InvalidRequest."""
    developer = "developer" in str(getattr(tokenizer, "chat_template", None) or "")
    flat = flatten(messages, developer)
    try:
        return clean(tokenizer.render(flat, tools=tools or None, **kwargs))
    except InvalidRequest:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"messages cannot be made a prompt: {error}", "messages") from error


def special_texts(tokenizer: Any) -> tuple[str, ...]:
    """The texts of the special tokens: the tokenizer splits there first, so ids on both sides do not depend on each other."""
    return tuple(text for id in sorted(tokenizer.special_ids) if (text := tokenizer.decode([id])))


def encode(tokenizer: Any, text: str, marks: Iterable[Mark] = (), specials: tuple[str, ...] | None = None) -> tuple[int, ...]:
    """ids of `text`; a session whose text begins it keeps the very ids it holds (encoding them anew often gives others).

    The cut must fall beside a special token, where no token can span it. specials: `special_texts(tokenizer)`, to save time.
    """
    specials = special_texts(tokenizer) if specials is None else specials
    for mark in sorted(marks, key=lambda m: len(m.text), reverse=True):
        if mark.text and mark.ids and text.startswith(mark.text):
            rest = text[len(mark.text) :]
            if not rest or mark.text.endswith(specials) or rest.startswith(specials):
                return (*mark.ids, *(tokenizer.encode(rest) if rest else ()))
    return tuple(tokenizer.encode(text))


def _merge(lead: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours of one role become one message: many templates allow a single system message, at the start."""
    merged: list[dict[str, Any]] = []
    for message in lead:
        if merged and merged[-1]["role"] == message["role"]:
            texts = (merged[-1]["content"], message["content"])
            merged[-1] = {**merged[-1], "content": "\n\n".join(t for t in texts if t)}
        else:
            merged.append(message)
    return merged


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object with role and content.", where)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role is {role!r}; use one of {', '.join(ROLES)}.", f"{where}.role")
    flat: dict[str, Any] = {"role": role, "content": _text(message.get("content"), f"{where}.content")}
    if isinstance(message.get("reasoning_content"), str):
        flat["reasoning_content"] = message["reasoning_content"]
    if role in ("tool", "function"):
        flat |= {key: message[key] for key in ("tool_call_id", "name") if isinstance(message.get(key), str)}
    if (calls := message.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            raise InvalidRequest(f"{where}.tool_calls must be a list.", f"{where}.tool_calls")
        if calls:
            flat["tool_calls"] = [_call(call, f"{where}.tool_calls[{j}]") for j, call in enumerate(calls)]
    return flat


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string, a list of text parts or null.", where)
    texts = []
    for j, part in enumerate(content):
        kind = "text" if isinstance(part, str) else str(part.get("type")) if isinstance(part, dict) else type(part).__name__
        text = part if isinstance(part, str) else part.get(TEXT_PARTS.get(kind, "")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            what = f"has type {kind!r}" if kind not in TEXT_PARTS else "has no text"
            raise InvalidRequest(f'{where}[{j}] {what}; this model reads text only: send {{"type": "text", "text": ...}}.', f"{where}[{j}]")
        texts.append(text)
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function must be an object with a name and arguments.", where)
    return {
        "id": call["id"] if isinstance(call.get("id"), str) else "",
        "type": "function",
        "function": {"name": function["name"], "arguments": _arguments(function.get("arguments"))},
    }


def _arguments(arguments: Any) -> Any:
    """A JSON string on the wire, a mapping (key order kept) in templates; what is no mapping goes through as it came."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
