"""Text to ids and back: a thin, hashable wrapper of `tokenizers.Tokenizer` with the model's chat template."""

from __future__ import annotations

import functools
import hashlib
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from . import chat
from .config import read_json

ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "</s>")
"""Special tokens that end an answer wherever a vocabulary has them."""


class Tokenizer:
    """Equal and hashed by content, so that it may be a static part of a model.

    backend: the tokenizer proper. templates: chat templates by name ("default", "tool_use", ...). names: what templates may
    print (bos_token, eos_token, ...). eos_ids: ids that end an answer; special tokens named in ENDS join them.
    adds_bos: whether the model expects its BOS before plain text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        templates: Mapping[str, str] | None = None,
        names: Mapping[str, str] | None = None,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        adds_bos: bool = False,
    ):
        self._backend = backend
        self._templates, self._names = dict(templates or {}), dict(names or {})
        self._added = {i: (t.content, t.special) for i, t in backend.get_added_tokens_decoder().items()}
        self.special_ids = frozenset(i for i, (_, special) in self._added.items() if special)
        ends = [i for i, (content, special) in self._added.items() if special and content in ENDS]
        self.bos_id, self.eos_ids, self.adds_bos = bos_id, tuple(dict.fromkeys([*eos_ids, *ends])), adds_bos
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._bytes = _byte_rule(backend)
        text = f"{self._templates}{self._names}{bos_id}{self.eos_ids}{adds_bos}{backend.to_str()}"
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.fingerprint == other.fingerprint

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, fingerprint={self.fingerprint[:8]})"

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Ids of text; special tokens written in it become their ids.

        bos: put the BOS first where the model expects one (`adds_bos`) and the text does not start with it already.
        """
        try:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):  # a lone surrogate, legal in JSON: U+FFFD, as a decoder would show it
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            ids = self._backend.encode(text, add_special_tokens=False).ids
        if bos and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token: int, special: bool = False) -> bytes:
        """The bytes a token stands for; b"" for ids outside the vocabulary and, unless `special`, for special tokens."""
        if token in self._added:
            content, is_special = self._added[token]
            return content.encode() if special or not is_special else b""
        piece = self._backend.id_to_token(token)
        return b"" if piece is None else self._bytes(piece)

    @property
    def chat_template(self) -> str | None:
        """The template used without tools, or None."""
        return self._templates.get("default") or next(iter(self._templates.values()), None)

    def render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The conversation as the model was trained to read it; kwargs reach the template. ValueError: a sentence why not."""
        template = self._templates.get("tool_use", self.chat_template) if tools else self.chat_template
        if template is None:
            raise ValueError("this model has no chat template; send a plain prompt, or put chat_template.jinja beside its files")
        values = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return chat.render(template, self._names | values | kwargs)


def read(directory: pathlib.Path, eos_ids: Iterable[int] = (), bos_id: int | None = None) -> Tokenizer | None:
    """Tokenizer of a Hugging Face directory (tokenizer.json, tokenizer_config.json, chat_template.*); None if it has none."""
    path = directory / "tokenizer.json"
    if not path.exists():
        if (directory / "tokenizer.model").exists():
            raise ValueError(f"{directory}: only tokenizer.model found; save it as tokenizer.json (transformers: save_pretrained)")
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: not a tokenizer file ({error})") from None
    backend.no_truncation()
    backend.no_padding()
    settings = directory / "tokenizer_config.json"
    given = read_json(settings) if settings.exists() else {}
    names = {k: _content(v) for k, v in given.items() if k.endswith("_token") and isinstance(v, str | dict)}
    ids = {k: backend.token_to_id(v) for k, v in names.items()}
    bos_id = ids.get("bos_token", None if given else bos_id)
    eos = [*eos_ids, *([ids["eos_token"]] if ids.get("eos_token") is not None else [])]
    adds = given.get("add_bos_token")
    if adds is None:  # the post-processor knows
        adds = bos_id is not None and backend.encode("a").ids[:1] == [bos_id]
    return Tokenizer(backend, _templates(directory, given), names, bos_id, eos, bool(adds))


def _templates(directory: pathlib.Path, given: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates: chat_template.jinja, else chat_template.json, else tokenizer_config.json."""
    jinja, plain = directory / "chat_template.jinja", directory / "chat_template.json"
    found: Any = given.get("chat_template")
    if jinja.exists():
        found = jinja.read_text(encoding="utf-8")
    elif plain.exists():
        found = read_json(plain).get("chat_template")
    if isinstance(found, list):
        return {entry["name"]: entry["template"] for entry in found}
    return {"default": found} if found else {}


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token.get("content"))


def _byte_rule(backend: tokenizers.Tokenizer) -> Any:
    """piece -> bytes, chosen by the backend's decoder."""
    decoder = backend.decoder
    state = decoder.__getstate__() if decoder is not None else b""
    if b'"ByteLevel"' in state:
        return _byte_level
    if b'"ByteFallback"' in state or b'"Metaspace"' in state:
        return _sentencepiece
    raise ValueError("tokenizer.json: its decoder is neither ByteLevel nor ByteFallback/Metaspace; only those are supported")


def _byte_level(piece: str) -> bytes:
    table = _byte_table()
    return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()


def _sentencepiece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\u2581", " ").encode()


@functools.cache
def _byte_table() -> dict[str, int]:
    """Byte-level BPE writes printable Latin-1 bytes as themselves and the others, in order, from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
