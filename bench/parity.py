"""Parity with kvpress on a real model: `python -m bench.parity [TEXT or METHOD ...]`, and `python -m bench.parity export FOLDER`.

Both sides hold the same dequantised weights in float32. tests/golden/make_kvpress.py wrote tests/golden/kvpress; this runs sejax on
the same texts, prints a line for each text, method and budget and what the criteria come to over all texts run so far, and keeps
them in bench/results/parity.jsonl.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

import sejax
from bench import forced
from bench.needles import Case, case
from bench.plot import insert
from bench.timing import RESULTS, commit
from sejax.models import families, gguf, loading
from sejax.models.family import layer_shapes, top_shapes

MODEL = "smollm2-135m"
PAGE = pathlib.Path(__file__).parents[1] / "docs/quality.md"
GOLDEN = pathlib.Path(__file__).parents[1] / "tests/golden/kvpress"
SHORT = (("needle", 640, 0), ("pairs", 640, 0))
MIDDLE = tuple((("needle", "pairs")[seed % 2], length, seed) for length, count in ((1024, 16), (2048, 4)) for seed in range(count))
LONG = (("needle", 8192, 0), ("pairs", 8192, 0))
SPECS = {
    "full": "full",
    "snapkv": "snapkv:budget={n},window=64,kernel=5,pooling=avg,slack=64",
    "pyramidkv": "pyramidkv:budgets={counts},window=64,kernel=5,pooling=avg,slack=64",
    "h2o": "h2o:budget={n},normalise=true,recent=0,period=0",
    "tova": "tova:budget={n},protect_last=true,period=0",
    "keydiff": "keydiff:budget={n},slack=64",
    "expected_attention": "expected_attention:budget={n},slack=64",
    "streamingllm": "streamingllm:sinks=4,recent={recent},positions=true,prefill=dense",
    "adakv": "adakv:budget={n},window=64,kernel=5,pooling=avg,rule=kvpress,slack=64",
    "kvzip": "kvzip:ratio={ratio},rule=kvpress,chunk=2048,instruction_ids={ids}",
}
"""kvpress's settings; a slack is longer than any answer, so that nothing is evicted after the seal."""


class Line(NamedTuple):
    """One method at one budget on one text. near: tokens whose reference score lies within 1e-4 of the limit and that differ;
    far: heads whose kept set differs in any other token (their Jaccard counts as 0); worst: largest |d log p| of the answer;
    agree of total: arg-maxes of the answer; found, expected: whether every token of the fact is the arg-max, here and there."""

    text: str
    method: str
    budget: int
    heads: int
    near: int
    far: int
    jaccard: float
    worst: float
    agree: int
    total: int
    found: bool
    expected: bool


def read(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


def spec(golden: dict[str, np.ndarray], v: int, length: int) -> tuple[str, int, str]:
    """(method, budget, sejax's spec) of the v-th variant."""
    method, _, count = str(golden["names"][v]).partition("/")
    n = int(count or 0)
    listed = lambda numbers: "(" + ",".join(map(str, numbers)) + ")"  # noqa: E731
    counts = golden["counts"][v, :, 0] if n else np.zeros(1)
    form = SPECS["snapkv" if method == "pyramidkv" and len({*counts}) == 1 else method]  # where kvpress's pyramid is flat, it says so
    ids = listed(golden.get("instruction", ()))
    return method, n, form.format(n=n, recent=n - 4, counts=listed(counts), ratio=(n + 0.5) / length, ids=ids)


def compare(model: sejax.Model, text: Case, methods: Iterable[str] | None = None, parts: Iterable[int] | None = None) -> list[Line]:
    """Every variant of a text; methods, parts: only those (a part is a divisor of the context's length)."""
    golden = read(text.name)
    ids = np.asarray(text.context + text.tail, "<i4").tobytes()
    if hashlib.sha256(ids).digest() != golden["ids"].tobytes():
        raise ValueError(f"{text.name}: the golden file was made from another text; make it again with tests/golden/make_kvpress.py")
    chosen = [(v, *spec(golden, v, len(text.context))) for v in range(len(golden["names"]))]
    chosen = [c for c in chosen if methods is None or c[1] in methods]
    chosen = [c for c in chosen if parts is None or not c[2] or len(text.context) // c[2] in parts]
    answers = forced.answers(model, [sejax.method(c[3]) for c in chosen], text.context, text.tail)
    return [line(text, golden, v, method, n, answer) for (v, method, n, _), answer in zip(chosen, answers, strict=True)]


def line(text: Case, golden: dict[str, np.ndarray], v: int, method: str, n: int, answer: forced.Answer) -> Line:
    near, far, jaccard, heads = sets(text, golden, v, answer.kept) if n else (0, 0, 1.0, 0)
    best, logp = np.append(-1, golden["best"][v]), np.append(np.float32(0), golden["logp"][v])
    at, fact, gold = list(text.answer), list(text.value), np.asarray(text.tail)
    worst = float(np.abs(answer.logp[at] - logp[at]).max())
    agree = int((answer.best[at] == best[at]).sum())
    found, expected = (bool((b[fact] == gold[fact]).all()) for b in (answer.best, best))
    return Line(text.name, method, n, heads, near, far, jaccard, worst, agree, len(at), found, expected)


def sets(text: Case, golden: dict[str, np.ndarray], v: int, kept: list[list[np.ndarray]]) -> tuple[int, int, float, int]:
    """(near tokens that differ, heads that differ elsewhere, mean Jaccard, heads compared)."""
    near = golden["near"][golden["near"][:, 0] == v]
    differ = far = 0
    overlap = []
    for layer, row in enumerate(kept):
        for head, positions in enumerate(row):
            ours = np.zeros(len(text.context), bool)
            ours[positions] = True
            close = near[(near[:, 1] == layer) & (near[:, 2] == head)]
            flips = int((ours[close[:, 3]] != close[:, 4]).sum())
            rest = ours.copy()
            rest[close[:, 3]] = False
            same = digest(rest) == golden["hashes"][v, layer, head]
            both = int(rest.sum()) + int((ours[close[:, 3]] & (close[:, 4] > 0)).sum())
            differ, far = differ + flips, far + (not same)
            overlap.append(both / (both + flips) if same else 0.0)
    return differ, far, float(np.mean(overlap)), len(overlap)


def digest(kept: np.ndarray) -> int:
    return int.from_bytes(hashlib.sha256(np.packbits(kept).tobytes()).digest()[:4], "little")


def summary(lines: list[Line]) -> dict[str, Any]:
    """The four criteria over lines of texts that are no longer than 2K where the fourth counts (and all of them elsewhere)."""
    pruned = [x for x in lines if x.budget]
    equal = [x for x in pruned if not x.far and not x.near]
    full = {x.text: x.found for x in lines if x.method == "full"}
    tasks: dict[str, list[bool]] = {}
    for text, found in full.items():
        if int(text.split("-")[1]) <= 2048:
            tasks.setdefault(text.split("-")[0], []).append(found)
    good = {task for task, found in tasks.items() if np.mean(found) >= 0.5}
    paired = [x for x in pruned if x.text.split("-")[0] in good and int(x.text.split("-")[1]) <= 2048]
    return {
        "lines": len(pruned),
        "heads": sum(x.heads for x in pruned),
        "near_flips": sum(x.near for x in pruned),
        "far_heads": sum(x.far for x in pruned),
        "jaccard": float(np.mean([x.jaccard for x in pruned])),
        "equal": len(equal),
        "worst_dlogp_equal": max((x.worst for x in equal), default=0.0),
        "argmax": sum(x.agree for x in pruned) / sum(x.total for x in pruned),
        "tokens": sum(x.total for x in pruned),
        "full_accuracy": {task: float(np.mean(found)) for task, found in tasks.items()},
        "pairs": len(paired),
        "flips": sum(x.found != x.expected for x in paired),
        "found": sum(x.found for x in paired),
        "expected": sum(x.expected for x in paired),
    }


def export(folder: pathlib.Path) -> None:
    """Weights in Hugging Face's names, tokenizer and texts, for the environment that has torch."""
    from safetensors.numpy import save_file

    model = sejax.load(MODEL, dtype="float32")
    config, tokenizer, family = model.config, model.tokenizer, families.by("name", model.config.family, MODEL)
    assert tokenizer is not None and config.tie_embeddings
    folder.mkdir(parents=True, exist_ok=True)
    source = gguf.File(loading.find(MODEL))
    names = [(name, None) for name in top_shapes(config)] + [(name, i) for i in range(config.layers) for name in layer_shapes(config)]
    weights = {family.tensor(name, i, 0): np.ascontiguousarray(source.read(family.tensor(name, i, 1))) for name, i in names}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    written = dict(
        architectures=[family.architecture],
        model_type="llama",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.max_position,
        rope_theta=config.rope.theta,
        tie_word_embeddings=True,
        bos_token_id=config.bos_id,
        eos_token_id=list(config.eos_ids),
    )
    (folder / "config.json").write_text(json.dumps(written))
    (folder / "tokenizer.json").write_text(tokenizer._backend.to_str())
    settings = dict(tokenizer_class="PreTrainedTokenizerFast", chat_template=tokenizer.chat_template, model_max_length=config.max_position)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    texts = [case(tokenizer, *key) for key in (*SHORT, *MIDDLE, *LONG)]
    written = [dict(name=t.name, context=t.context, tail=t.tail) for t in texts]
    (folder / "texts.json").write_text(json.dumps(written))


def main(names: list[str]) -> int:
    if names[:1] == ["export"]:
        export(pathlib.Path(names[1]))
        return 0
    model = sejax.load(MODEL, dtype="float32")
    assert model.tokenizer is not None
    file, methods = RESULTS / "parity.jsonl", [name for name in names if name in SPECS]
    for key in (*SHORT, *MIDDLE, *LONG):
        text = case(model.tokenizer, *key)
        if (len(names) > len(methods) and text.name not in names) or not (GOLDEN / f"{text.name}.npz").exists():
            continue
        lines = compare(model, text, methods or None)
        print("\n".join(map(shown, lines)), flush=True)
        with file.open("a") as out:
            out.write("".join(json.dumps(x._asdict()) + "\n" for x in lines))
    known = [json.loads(row) for row in file.read_text().splitlines()]
    found = {(x["text"], x["method"], x["budget"]): Line(**x) for x in known if "summary" not in x}  # a later run replaces an earlier one
    result = summary([*found.values()]) | {"commit": commit()}
    file.write_text("".join(json.dumps(x) + "\n" for x in (*(line._asdict() for line in found.values()), {"summary": result})))
    print(json.dumps(result, indent=1))
    insert(PAGE, "parity", table([*found.values()], result))
    return 0


def table(lines: list[Line], result: dict[str, Any]) -> str:
    """Markdown: the criteria by method, and over all."""
    rows = ["| method | texts x budgets | tokens that differ | mean Jaccard | worst log-probability | arg-max | fact found, by kvpress |"]
    rows.append("|---" * 7 + "|")
    for method in SPECS:
        if method == "full" or not (mine := [x for x in lines if x.method == method]):
            continue
        near, far = sum(x.near for x in mine), sum(x.far for x in mine)
        agree = sum(x.agree for x in mine) / sum(x.total for x in mine)
        both = f"{sum(x.found for x in mine)}, {sum(x.expected for x in mine)} of {len(mine)}"
        middle = f"{near} near{f', {far} heads' if far else ''} | {np.mean([x.jaccard for x in mine]):.6f}"
        rows.append(f"| `{method}` | {len(mine)} | {middle} | {max(x.worst for x in mine):.0e} | {agree:.2%} | {both} |")
    texts = sorted({int(x.text.split("-")[1]) for x in lines})
    counts = ", ".join(f"{len({x.text for x in lines if f'-{size}-' in x.text})} of {size}" for size in texts)
    total = f"{result['flips']} of {result['pairs']} texts and budgets answered otherwise; {result['far_heads']} of {result['heads']} heads"
    return "\n".join([*rows, "", f"Texts: {counts} tokens. {total} differ in a token that is not near the limit."])


def shown(line: Line) -> str:
    form = "{:15} {:18} {:5d} kept, {} heads: near {} far {} jaccard {:.5f} dlogp {:.1e} argmax {}/{} found {:d}, there {:d}"
    text, method, budget, heads, near, far, *rest = line
    return form.format(text, method, budget, heads, near, far, *rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
