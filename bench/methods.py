"""Decode step time against context length, every method, on a GPU: `python -m bench.methods [NAME ...]`.

Programs of Qwen3-8B's layers, 16 rows, random bf16 weights and pools filled without a prefill, for DEPTHS layers each; the time of 36
layers follows from the difference. What a method keeps is filled as after a prompt of that length. Left
out: methods whose layers or heads keep different numbers of rows (pyramidkv, kvzip), skipkv (as rkv), flashprefill (prompts only).
"""

from __future__ import annotations

import dataclasses
import gc
import sys

import sejax
from bench.step import random_model, step_seconds, stepper
from bench.timing import record

ROWS, LAYERS, DEPTHS = 16, 36, (3, 7)
CONTEXTS = (8192, 32768, 65536)
type Spec = tuple[str, int | None, bool]  # spec, rows kept of a longer context (None: all), whether its prompt's end builds an index
SPECS: dict[str, Spec] = {
    "full": ("full", None, False),
    "streamingllm": ("streamingllm:sinks=4,recent=4092", 4096, False),
    "snapkv": ("snapkv:budget=4096", 4096, False),
    "adakv": ("adakv:budget=4096", 4096, False),
    "h2o": ("h2o:budget=4096", 4096, False),
    "tova": ("tova:budget=4096,period=128", 4096, False),
    "rkv": ("rkv:budget=4096", 4096, False),
    "expected_attention": ("expected_attention:budget=4096", 4096, False),
    "keydiff": ("keydiff:budget=4096", 4096, False),
    "quest": ("quest:budget=2048", None, False),
    "omnikv": ("omnikv:observers=(2,),ratio=0.067", None, True),
    "retroinfer": ("retroinfer", None, True),
    "rkv_quest": ("rkv:budget=4096 + quest:budget=1024", 4096, False),
}


def main(names: list[str]) -> None:
    whole = random_model("8b")
    for name in names or SPECS:
        spec, most, indexed = SPECS[name]
        method = sejax.method(spec)
        for context in CONTEXTS:
            taken = []
            try:
                for depth in DEPTHS:
                    config = dataclasses.replace(whole.config, layers=depth)
                    model = whole.replace(config=config, params=whole.params | {"layers": whole.params["layers"][:depth]})
                    taken.append(step_seconds(stepper(model, method, ROWS, context, most and min(most, context), indexed), 16, 3))
                    gc.collect()
            except Exception as error:  # one method must not cost the others
                print(f"{name} {context}: FAILED {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            a, b = taken
            seconds = b + (LAYERS - DEPTHS[1]) * (b - a) / (DEPTHS[1] - DEPTHS[0])
            record("methods", f"methods/{name}/b{ROWS}_t{context // 1024}k", seconds * 1e3, "ms", None, None)


if __name__ == "__main__":
    main(sys.argv[1:])
