"""SmolLM2-135M-Instruct from its GGUF file: ids as llama.cpp's, greedy continuations as `transformers`'."""

import json
import pathlib

import jax
import numpy as np

from sejax.models import logits

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TOKENS = json.loads((GOLDEN / "tokens.json").read_text())
ANSWERS = json.loads((GOLDEN / "smollm2.json").read_text())


def test_ids(smollm2):
    for case in TOKENS["texts"] + TOKENS["prompts"]:
        assert smollm2.tokenizer.encode(case["text"]) == case["ids"], case["text"]


def test_bytes(smollm2):
    """The tokens' bytes join to the text, whatever the characters."""
    for case in TOKENS["texts"]:
        text = b"".join(smollm2.tokenizer.token_bytes(i, special=True) for i in case["ids"]).decode()
        assert text == case["text"] == smollm2.tokenizer.decode(case["ids"])


def test_template(smollm2):
    for case in TOKENS["prompts"]:
        if "messages" in case:
            assert smollm2.tokenizer.render(case["messages"]) == case["text"]


def test_settings(smollm2):
    assert smollm2.config.max_position == 8192 and smollm2.config.tie_embeddings and smollm2.config.group == 3
    assert smollm2.config.bos_id == 1 and smollm2.config.eos_ids == smollm2.tokenizer.eos_ids == (2, 0)
    assert smollm2.tokenizer.encode("hi", bos=True) == smollm2.tokenizer.encode("hi")  # the file says: no BOS


def _follow(model, cases):
    """One pass over prompt and golden continuation: the best token at each step is the golden one, near ties aside."""
    width = -(-max(len(p["ids"]) + len(a["new"]) for p, a in cases) // 64) * 64
    tokens = np.zeros((len(cases), width), np.int32)
    for row, (prompt, answer) in zip(tokens, cases, strict=True):
        row[: len(prompt["ids"]) + len(answer["new"])] = prompt["ids"] + answer["new"]
    best = np.asarray(jax.jit(lambda m, t: logits(m, t).argmax(-1))(model, tokens))
    for row, (prompt, answer) in zip(best, cases, strict=True):
        got = row[len(prompt["ids"]) - 1 :][: len(answer["new"])]
        wrong = [i for i in np.flatnonzero(got != answer["new"]) if i not in answer["ties"]]
        assert not wrong, (prompt["text"], wrong)


def test_greedy(smollm2):
    cases = list(zip(TOKENS["prompts"], ANSWERS, strict=True))
    for at in range(0, len(cases), 5):
        _follow(smollm2, cases[at : at + 5])
