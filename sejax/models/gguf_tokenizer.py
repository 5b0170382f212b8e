"""A tokenizer built from a GGUF file's vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from .tokenizer import Tokenizer

_UNKNOWN, _CONTROL, _USER = 2, 3, 4  # entries of tokenizer.ggml.token_type
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def build(fields: Mapping[str, Any], where: str) -> Tokenizer | None:
    """Tokenizer from the file's metadata; None if it holds no vocabulary. ValueError names an unknown model or pre-tokenizer."""

    def get(key: str, default: Any = None) -> Any:
        return fields.get(f"tokenizer.ggml.{key}", default)

    kind, pieces = get("model"), get("tokens")
    if kind is None or pieces is None:
        return None
    types = get("token_type") or [1] * len(pieces)
    pre = get("pre", "default")
    if kind == "gpt2":
        backend = _byte_level(pieces, get("merges") or [], pre, where)
    elif kind == "llama":
        backend = _sentencepiece(pieces, get("scores") or [0.0] * len(pieces), types, get("add_space_prefix", True))
    else:
        raise ValueError(f"{where}: tokenizer model {kind!r} is not supported; supported are gpt2 and llama")
    backend.add_special_tokens([AddedToken(p, normalized=False) for p, t in zip(pieces, types, strict=True) if t in (_UNKNOWN, _CONTROL)])
    backend.add_tokens([AddedToken(p, normalized=False) for p, t in zip(pieces, types, strict=True) if t == _USER])
    given = {name: get(f"{name}_token_id") for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    ids: dict[str, Any] = {n: i if i is not None and i < len(pieces) else None for n, i in given.items()}  # 2**32 - 1: none
    labels = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    names = {label: pieces[ids[name]] for name, label in labels.items() if ids[name] is not None}
    prefix = "tokenizer.chat_template"
    templates = {k.removeprefix(prefix).lstrip(".") or "default": v for k, v in fields.items() if k == prefix or k.startswith(f"{prefix}.")}
    ends = [ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None]
    adds = get("add_bos_token", kind == "llama" or pre == "llama-bpe")
    return Tokenizer(backend, templates, names, ids["bos"], ends, bool(adds))


def _byte_level(pieces: Sequence[str], merges: Sequence[str], pre: str, where: str) -> tokenizers.Tokenizer:
    whole = pre == "llama-bpe"  # Llama 3 takes a word that is a token as it is
    try:
        pairs = [(a, b) for a, b in (m.split(" ", 1) for m in merges)]
        model = models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=pairs, ignore_merges=whole)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{where}: the vocabulary is damaged: {error}") from None
    backend = tokenizers.Tokenizer(model)
    plain, bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.ByteLevel(False, use_regex=False)
    if pre == "smollm":
        splitter = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    elif pre in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
        splitter = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS % ""), "isolated"), bytes_only])
    elif pre == "llama-bpe":
        splitter = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS % "{1,3}"), "isolated"), bytes_only])
    elif pre == "gpt-2":
        splitter = plain
    else:
        raise ValueError(f"{where}: pre-tokenizer {pre!r} is not supported; supported are gpt-2, llama-bpe, qwen2, smollm")
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], prefix: bool) -> tokenizers.Tokenizer:
    """SentencePiece BPE: of all pairs that join to a token, the one with the best score goes first."""
    vocab = {p: i for i, p in enumerate(pieces)}
    unknown = next((p for p, t in zip(pieces, types, strict=True) if t == _UNKNOWN), None)
    joins = []
    for rank, piece in sorted(enumerate(pieces), key=lambda e: (-scores[e[0]], e[0])):
        if types[rank] == 1:
            joins += [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in vocab and piece[i:] in vocab]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=joins, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space = [normalizers.Replace(" ", "\u2581")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), *space] if prefix else space)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend
