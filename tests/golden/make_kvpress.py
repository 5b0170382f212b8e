"""Makes kvpress/*.npz: what kvpress keeps of each text of bench/parity.py, and how the pruned model then scores the gold answer.

Run by hand, in an environment with torch 2.13 and kvpress 0.5.5, after `python -m bench.parity export FOLDER`:
python tests/golden/make_kvpress.py FOLDER [check] [NAME ...]

One dense pass a text; kvpress's own `score` and `compress` run on its tensors in every layer. Then all variants answer at once: a
batch of the same tokens, each reading what it kept through a mask. `check` also compares that with kvpress's usual way, token by
token over a pruned cache.
"""

import hashlib
import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from kvpress import (
    AdaKVPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KVzipPress,
    ObservedAttentionPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

HERE = pathlib.Path(__file__).parent / "kvpress"
NEAR, SINKS, PARTS = 1e-4, 4, (8, 4, 2)
PRESSES = {
    "snapkv": lambda r: SnapKVPress(r, window_size=64, kernel_size=5),
    "pyramidkv": lambda r: PyramidKVPress(r, window_size=64, kernel_size=5),
    "h2o": ObservedAttentionPress,
    "tova": TOVAPress,
    "keydiff": KeyDiffPress,
    "expected_attention": ExpectedAttentionPress,
    "streamingllm": lambda r: StreamingLLMPress(r, n_sink=SINKS),
    "adakv": lambda r: AdaKVPress(SnapKVPress(r, window_size=64, kernel_size=5), alpha_safeguard=0.2),
    "kvzip": lambda r: KVzipPress(r, n_sink=SINKS, chunk_size=2048),
}


class Variant:
    """One method at one budget of one text: its press, and per layer what it keeps bool[H,T] and which scores lie near a limit."""

    def __init__(self, method, count, length):
        self.name, self.method, self.count = f"{method}/{count}", method, count
        self.press = PRESSES[method](1 - (count + 0.5) / length)
        self.scorer = self.press.press if method == "adakv" else self.press
        self.kept, self.near = [], []

    def layer(self, module, hidden, keys, values, attentions, kwargs, known):
        """known: scores of this layer by method; only a window's depend on the budget."""
        if self.method == "streamingllm" or self.method not in known:
            known[self.method] = self.scorer.score(module, hidden, keys, values, attentions if self.method == "h2o" else None, kwargs)
        scores = known[self.method]
        self.scorer.score = lambda *_: scores.clone()
        if self.method == "adakv":
            module.config._attn_implementation, before = "sdpa", module.config._attn_implementation
            self.press.compress(module, hidden, keys, values, None, kwargs)
            module.config._attn_implementation = before
            kept = unmasked(module, scores)
        else:  # compress gathers rows of "values": their own numbers tell which
            numbers = torch.arange(keys.shape[2])[None, None, :, None].expand(keys.shape)
            found = self.press.compress(module, hidden, keys, numbers, None, kwargs)[1][0, :, :, 0]
            kept = torch.zeros(scores.shape[1:], dtype=torch.bool).scatter_(1, found, True)
        del self.scorer.score
        self.kept.append(kept)
        self.near.append(self.close(scores[0], kept))

    def close(self, scores, kept):
        """bool[H,T]: scores within NEAR, relative, of the lowest that is kept (adakv: in the layer; and of each head's safe limit)."""
        inside = torch.where(kept, scores, torch.inf)
        if self.method != "adakv":
            limits = [inside.min(dim=1, keepdim=True).values]
        else:
            safe = torch.topk(scores, max(1, int(self.count * 0.2)), dim=1)
            rest = inside.scatter(1, safe.indices, torch.inf)
            limits = [rest.min(), safe.values[:, -1:]]
        near = [(scores - limit).abs() <= NEAR * limit.abs() for limit in limits]
        return torch.stack(near).any(0) & (scores < scores.max()) if self.method != "streamingllm" else torch.zeros_like(kept)

    def visible(self, layer, tail):
        """bool[H,t,T]: what each token of the tail reads of the context. A window slides on: its own rule, not kvpress's."""
        kept = self.kept[layer][:, None].expand(-1, tail, -1)
        if self.method != "streamingllm":
            return kept
        first = kept.shape[2] + 1 + torch.arange(tail)[:, None] - (self.count - SINKS)
        token = torch.arange(kept.shape[2])
        return kept & ((token >= first) | (token < SINKS))


def unmasked(module, scores):
    """What the indices left at a module do not mask: bool[H,T] for scores [1,H,T]."""
    kept = torch.ones(scores.shape[1:], dtype=torch.bool)
    _, head, token = module.masked_key_indices
    kept[head, token] = False
    module.masked_key_indices = None
    return kept


def replay(model, tokenizer, context, cache, variants):
    """The press that lets the model repeat its context: one replay scores it for every budget. -> ids of its instructions."""
    press = variants[0].press
    instruction = []
    with press(model):  # nothing is prefilled inside: it only reads the template
        suffix = press._suffix_ids
    press.prefix_length, press._suffix_ids = SINKS, suffix  # the context begins behind the sinks, as in sejax
    press._context_ids, press._cache = torch.tensor([context]), cache
    prepare = press.prepare
    press.prepare = lambda *a: instruction.extend(prepare(*a)) or instruction
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        press._perform_kvzip_compression(model, tokenizer)
        for v in variants:
            press.compression_ratio = v.press.compression_ratio
            press.compress_post(model)
            scores = press.score_val[:, 0]
            for i, layer in enumerate(model.model.layers):
                v.kept.append(unmasked(layer.self_attn, press.score_val[i]))
            limit = scores[torch.stack(v.kept)].min()
            v.near = list(((scores - limit).abs() <= NEAR * limit.abs()) & (scores < scores.max()))
    return {"instruction": np.asarray(told(instruction, suffix), np.int32)}


def told(chunks, suffix):
    """The instructions of a replay, as sejax's instruction_ids: the first; later ones less the chunk's last 8 tokens; the postfix."""
    heads = [whole[0, : whole.shape[1] - part.shape[1]].tolist() for part, whole in chunks]
    end = suffix[0].tolist()
    assert all(head[-len(end) :] == end for head in heads)
    heads = [head[: -len(end)] for head in heads]
    return [*heads[0], -1, *heads[1][:-8], -1, *end] if len(heads) > 1 else [*heads[0], *end]


def collect(model, context, variants):
    """One dense pass; its cache, and every variant's choice in every layer."""
    store = transformers.DynamicCache()

    def hook(module, args, kwargs, output):
        cache = kwargs["past_key_values"].layers[module.layer_idx]
        known = {}
        for variant in variants:
            variant.layer(module, kwargs["hidden_states"], cache.keys, cache.values, output[1], kwargs, known)

    model.set_attn_implementation("by_head")
    hooks = []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
        hooks.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
    with torch.no_grad():
        model.model(input_ids=torch.tensor([context]), past_key_values=store)
    for h in hooks:
        h.remove()
    return store


def by_head(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Eager attention that holds one head's probabilities at a time, T x T; returned are their sums over queries, f32[1,Hq,1,T]."""
    _, heads, length, width = query.shape
    out, sums = torch.empty(1, length, heads, width), torch.empty(1, heads, 1, length)
    logits, probability = torch.empty(2, length, length)
    later = torch.ones(length, length, dtype=torch.bool).triu_(1)
    for head in range(heads):
        at = head * key.shape[1] // heads
        torch.matmul(query[0, head], key[0, at].T, out=logits)
        logits.mul_(scaling).masked_fill_(later, -torch.inf)
        torch.softmax(logits, -1, out=probability)
        out[0, :, head] = probability @ value[0, at]
        sums[0, head, 0] = probability.sum(0)
    return out, sums


def over_kept(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention of the tail to the context it may see (module.seen bool[V,H,t,T]) and to itself."""
    rows, heads, tail = query.shape[:3]
    k, v = (torch.cat([old.expand(rows, -1, -1, -1), new], dim=2) for old, new in zip(module.context, (key, value), strict=True))
    causal = torch.ones(tail, tail, dtype=torch.bool).tril().expand(rows, key.shape[1], tail, tail)
    mask = torch.cat([module.seen, causal], dim=3).repeat_interleave(heads // key.shape[1], dim=1)
    k, v = (x.repeat_interleave(heads // key.shape[1], dim=1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


for attention in (by_head, over_kept):
    ALL_ATTENTION_FUNCTIONS[attention.__name__] = attention
    ALL_MASK_ATTENTION_FUNCTIONS[attention.__name__] = lambda *args, **kwargs: None


def answer(model, length, tail, store, seen):
    """Logits f32[V,t,vocabulary] of the tail; seen(layer) -> bool[V,H,t,T]."""
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.context, layer.self_attn.seen = (store.layers[i].keys, store.layers[i].values), seen(i)
    rows = layer.self_attn.seen.shape[0]
    model.set_attn_implementation("over_kept")
    with torch.no_grad():
        ids = torch.tensor([tail]).expand(rows, -1)
        return model(ids, position_ids=length + torch.arange(len(tail))[None].expand(rows, -1), use_cache=False).logits


def usual(model, variant, context, tail):
    """The same logits by kvpress as it is used: hooks prune a cache, tokens follow one by one."""
    model.set_attn_implementation("eager" if variant.method == "h2o" else "sdpa")
    cache, found = transformers.DynamicCache(), []
    with torch.no_grad():
        with variant.press(model):
            model.model(input_ids=torch.tensor([context]), past_key_values=cache)
            variant.press.prefix_length = SINKS  # as in replay
        for i, token in enumerate(tail):
            place = torch.tensor([[len(context) + i]])
            found.append(model(torch.tensor([[token]]), past_key_values=cache, position_ids=place).logits[0])
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    return torch.cat(found)


def check(model, variants, text, store):
    """The batch over masks gives what kvpress's usual way gives (a window that does not slide, as there)."""
    context, tail = text["context"], text["tail"]
    for v in variants:
        ours = answer(model, len(context), tail, store, lambda i, v=v: v.kept[i][None, :, None].expand(1, -1, len(tail), -1))[0]
        ours, theirs = (x.log_softmax(-1)[:-1].gather(1, torch.tensor(tail[1:])[:, None]) for x in (ours, usual(model, v, context, tail)))
        print(f"  {v.name}: {float((ours - theirs).abs().max()):.1e} from the usual way", flush=True)
        assert (ours - theirs).abs().max() < 1e-3, v.name


def record(model, tokenizer, text, full, checked):
    context, tail = text["context"], text["tail"]
    variants = [Variant(m, len(context) // part, len(context)) for m in PRESSES for part in PARTS]
    zips = [v for v in variants if v.method == "kvzip"]
    store = collect(model, context, [v for v in variants if v not in zips])
    extra = replay(model, tokenizer, context, store, zips)
    logits = []
    for first in range(0, len(variants), 8):
        some = variants[first : first + 8]
        seen = lambda i, some=some: torch.stack([v.visible(i, len(tail)) for v in some])  # noqa: E731
        logits.append(answer(model, len(context), tail, store, seen).log_softmax(-1))
    logits.append(
        answer(model, len(context), tail, store, lambda i: torch.ones(1, 3, len(tail), len(context), dtype=torch.bool)).log_softmax(-1)
    )
    logits = torch.cat(logits)
    gold = torch.tensor(tail[1:])[None, :, None].expand(len(logits), -1, -1)
    kept = torch.stack([torch.stack(v.kept) for v in variants]).numpy()  # [V,L,H,T]
    near = torch.stack([torch.stack(v.near) for v in variants]).numpy()
    at = np.argwhere(near)
    found = {
        "ids": np.frombuffer(hashlib.sha256(np.asarray(context + tail, "<i4").tobytes()).digest(), np.uint8),
        "names": np.asarray([v.name for v in variants] + ["full"]),
        "logp": logits[:, :-1].gather(2, gold)[..., 0].numpy(),  # of tail[1:]
        "best": logits[:, :-1].argmax(-1).int().numpy(),
        "counts": kept.sum(-1).astype(np.int16),
        "hashes": np.asarray([[[digest(h) for h in layer] for layer in v] for v in kept & ~near], np.uint32),
        "near": np.concatenate([at, kept[tuple(at.T)][:, None]], axis=1).astype(np.int16),  # variant, layer, head, token, kept
    }
    np.savez_compressed(HERE / f"{text['name']}.npz", **found, **extra)
    np.savez_compressed(full / f"{text['name']}.npz", kept=np.packbits(kept, axis=-1))
    print(text["name"], len(at), "near", (HERE / f"{text['name']}.npz").stat().st_size, "bytes", flush=True)
    if checked:
        check(model, [v for v in variants if v.count == len(context) // 2], text, store)


def digest(kept):
    return int.from_bytes(hashlib.sha256(np.packbits(kept).tobytes()).digest()[:4], "little")


def main(folder, *names):
    checked, names = "check" in names, [name for name in names if name != "check"]
    path = pathlib.Path(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    full = path / "full"
    full.mkdir(exist_ok=True)
    HERE.mkdir(exist_ok=True)
    texts = {text["name"]: text for text in json.loads((path / "texts.json").read_text())}
    for text in [texts[name] for name in names or texts]:
        record(model, tokenizer, text, full, checked)


if __name__ == "__main__":
    main(*sys.argv[1:])
