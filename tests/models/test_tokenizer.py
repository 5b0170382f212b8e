"""Tokenizers from Hugging Face directories and GGUF vocabularies; chat templates."""

import json

import jax
import jax.numpy as jnp
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from sejax.models import gguf_tokenizer, tokenizer
from sejax.models.tokenizer import _byte_table

LETTERS = {byte: letter for letter, byte in _byte_table().items()}
TEMPLATE = """{% for m in messages %}
    {% if m.role == 'banana' %}{{ raise_exception('no role ' + m.role) }}{% endif %}
{{ bos_token if loop.first }}<|im_start|>{{ m.role }}
{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>
{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def _directory(path, bos=False, **settings):
    """A byte-level tokenizer: 256 bytes, "he", then <s>, <|im_start|>, <|im_end|> (special) and <think> (not special)."""
    vocab = {LETTERS[b]: b for b in range(256)} | {"he": 256}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    if bos:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 257)])
    path.mkdir(exist_ok=True)
    backend.enable_truncation(4)
    backend.save(str(path / "tokenizer.json"))
    given = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>", "special": True}, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(given | settings))
    return path


def test_encode_and_decode(tmp_path):
    t = tokenizer.read(_directory(tmp_path))
    assert t.encode("hehe <|im_end|>") == [256, 256, 32, 259] and t.special_ids == {257, 258, 259}
    assert t.decode([256, 259, 33]) == "he<|im_end|>!" and t.decode([256, 259, 33], skip_special=True) == "he!"
    assert t.encode("\ud83d!") == list("\ufffd!".encode())  # a lone surrogate, as JSON may hold
    assert t.encode("\ud83d\ude00") == list("😀".encode())
    assert (t.vocab_size, t.bos_id, t.eos_ids) == (261, 257, (259,))


def test_token_bytes(tmp_path):
    t = tokenizer.read(_directory(tmp_path))
    assert [t.token_bytes(b) for b in range(256)] == [bytes([b]) for b in range(256)]
    assert t.token_bytes(256) == b"he" and t.token_bytes(260) == b"<think>"
    assert t.token_bytes(259) == b"" and t.token_bytes(259, special=True) == b"<|im_end|>"
    assert t.token_bytes(9999) == b""


def test_bos_once(tmp_path):
    """P19: one BOS where the model expects one, never two, none by default."""
    adds, told, never = (
        tokenizer.read(_directory(tmp_path / n, **kw))
        for n, kw in (("a", {"bos": True}), ("b", {"add_bos_token": True}), ("c", {"bos": True, "add_bos_token": False}))
    )
    null = tokenizer.read(_directory(tmp_path / "d", bos_token=None))
    for t, expected in ((adds, [257, 33]), (told, [257, 33]), (never, [33]), (null, [33])):
        assert t.encode("!") == [33] and t.encode("!", bos=True) == expected
        assert t.encode("<s>!", bos=True) == [257, 33]
    assert adds.encode("", bos=True) == [257]


def test_equal_by_content(tmp_path):
    a, b = (tokenizer.read(_directory(tmp_path / n)) for n in "ab")
    c = tokenizer.read(_directory(tmp_path / "c", chat_template="other"))
    assert a == b and hash(a) == hash(b) and a != c and a.fingerprint != c.fingerprint
    traces = []

    @jax.jit
    def f(model, x):
        traces.append(1)
        return x * model.params["w"]

    from sejax.models import Model

    for t in (a, b, c):
        f(Model({"w": jnp.ones(())}, None, t), 1.0)
    assert len(traces) == 2


def test_render(tmp_path):
    t = tokenizer.read(_directory(tmp_path))
    messages = [{"role": "user", "content": "<b>hi</b>"}, {"role": "assistant", "content": "yo"}]
    text = "<s><|im_start|>user\n<b>hi</b><|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    assert t.render(messages, add_generation_prompt=False) == text
    assert t.render(messages, tools=[{"a": "<ü>"}]) == text + '[{"a": "<ü>"}]<|im_start|>assistant\n'
    assert t.render(messages, bos_token="X").startswith("X<|im_start|>")


def test_template_errors(tmp_path):
    t = tokenizer.read(_directory(tmp_path))
    with pytest.raises(ValueError, match="chat template refuses these messages: no role banana"):
        t.render([{"role": "banana", "content": ""}])
    cases = [
        ("{{ messages[0].x.y }}", "needs a value that the messages lack"),
        ("{{ 1 / 0 }}", "failed on these messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),  # the sandbox
        ("{% if %}", "is not valid Jinja"),
    ]
    for template, message in cases:
        t = tokenizer.read(_directory(tmp_path, chat_template=template))
        with pytest.raises(ValueError, match=message):
            t.render([{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="this model has no chat template"):
        tokenizer.read(_directory(tmp_path, chat_template=None)).render([])


def test_template_files(tmp_path):
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B {{ strftime_now('%Y') | length }}"}]
    path = _directory(tmp_path, chat_template=named)
    assert tokenizer.read(path).render([]) == "A" and tokenizer.read(path).render([], tools=[1]) == "B 4"
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "C"}))
    assert tokenizer.read(path).chat_template == "C"
    (path / "chat_template.jinja").write_text("D")
    assert tokenizer.read(path).chat_template == "D"


def test_absent_and_broken(tmp_path):
    assert tokenizer.read(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ValueError, match="only tokenizer.model found"):
        tokenizer.read(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json: not a tokenizer file"):
        tokenizer.read(tmp_path)


def _gguf(pre, merges=("h e", "1 2", "12 3", "123 4"), **fields):
    pieces = [LETTERS[b] for b in range(256)] + [m.replace(" ", "") for m in merges] + ["<|eot_id|>", "<|begin|>"]
    types = [1] * (len(pieces) - 2) + [3, 3]
    keys = {"model": "gpt2", "pre": pre, "tokens": pieces, "token_type": types, "merges": list(merges)}
    keys |= {"bos_token_id": len(pieces) - 1, "eos_token_id": len(pieces) - 2, **fields}
    return gguf_tokenizer.build({f"tokenizer.ggml.{k}": v for k, v in keys.items()} | {"tokenizer.chat_template": "T"}, "f")


def test_gguf_splits_numbers():
    """Digits one by one (smollm, qwen2), by threes from the left (llama-bpe), or whole (gpt-2)."""
    pieces = {}
    for pre in ("smollm", "qwen2", "llama-bpe", "gpt-2"):
        t = _gguf(pre)
        pieces[pre] = [t.decode([i]) for i in t.encode("12345 he")]
    one = ["1", "2", "3", "4", "5", " ", "he"]
    assert pieces == {"smollm": one, "qwen2": one, "llama-bpe": ["123", "4", "5", " ", "he"], "gpt-2": ["1234", "5", " ", "he"]}


def test_gguf_settings():
    t = _gguf("llama-bpe")
    assert t.adds_bos and t.encode("he", bos=True) == [t.bos_id, 256] and t.chat_template == "T"
    assert t.eos_ids == (t.bos_id - 1,) and t.special_ids == {t.bos_id, t.bos_id - 1}
    assert not _gguf("smollm").adds_bos and _gguf("smollm", add_bos_token=True).adds_bos
    assert _gguf("qwen2").encode("e\u0301") == list("é".encode())  # NFC, as the model was trained
    merges = ("b c", "a b", "ab c")  # lead from "abc" to "a", "bc"; only llama-bpe takes a word that is a token as it is
    assert len(_gguf("llama-bpe", merges).encode("abc")) == 1 and len(_gguf("qwen2", merges).encode("abc")) == 2
    with pytest.raises(ValueError, match="f: the vocabulary is damaged: .*`xx` out of vocabulary"):
        _gguf("qwen2", merges=("xx y",))


def test_gguf_sentencepiece():
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + ["\u2581", "a", "b", "c", "ab", "bc", "\u2581a", "abc"]
    types = [2, 3, 3] + [6] * 256 + [1] * 8
    scores = [0.0] * 259 + [-9.0] * 4 + [-3.0, -1.0, -2.0, -4.0]
    keys = {"model": "llama", "tokens": pieces, "token_type": types, "scores": scores, "bos_token_id": 1, "eos_token_id": 2}
    t = gguf_tokenizer.build({f"tokenizer.ggml.{k}": v for k, v in keys.items()}, "f")
    words = lambda text: [pieces[i] for i in t.encode(text)]  # noqa: E731
    assert words("abc") == ["\u2581a", "bc"]  # "bc" has the best score, then "\u2581a"
    assert words("b é") == ["\u2581", "b", "\u2581", "<0xC3>", "<0xA9>"]
    assert t.decode(t.encode("abc é")) == "abc é" and t.adds_bos and t.encode("a", bos=True)[0] == 1
    assert b"".join(t.token_bytes(i) for i in t.encode("b é")) == " b é".encode()
    assert t.eos_ids == (2,) and 0 in t.special_ids and t.token_bytes(2) == b""
