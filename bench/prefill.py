"""A prompt chunk's attention in one layer, dense against by blocks, on a GPU: `python -m bench.prefill`.

Llama-3.1-8B's heads, 2048 queries at the end of a context in random pages of a bf16 pool. Keys of a block share a direction and so do
the queries of a tile, drawn so that a tile looks at few blocks; the share read is printed. Everything is in the time: block
means, scores, lists, attention, correction.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from bench.timing import record, seconds
from sejax.kernels import tiles
from sejax.kernels.attention import attention
from sejax.methods.flashprefill import Rule, chosen, energies, reader, tiling
from sejax.types import Array, AttentionView, Rows

HEADS, GROUP, SIZE, PAGE, NEW, BLOCK = 8, 4, 128, 16, 2048, 128
RULE = Rule(0.1, BLOCK, 128 // GROUP, 2, 4, 8, 4096, False, True)


def inputs(context: int) -> tuple[Array, AttentionView, Rows]:
    """q, a view of `context` tokens, the last NEW of them this call's; not yet the prompt's end."""
    seeds = jax.random.split(jax.random.key(0), 6)
    normal = lambda i, *shape: jax.random.normal(seeds[i], shape)  # noqa: E731
    pages, blocks, width = context // PAGE, context // BLOCK, RULE.width
    table = jax.random.permutation(seeds[0], pages).astype(jnp.int32)
    k = 3.2 * normal(1, blocks, 1, HEADS, 1, SIZE) + normal(2, blocks, BLOCK // PAGE, HEADS, PAGE, SIZE)
    k = jnp.zeros((pages, HEADS, PAGE, SIZE), jnp.bfloat16).at[table].set(k.reshape(pages, HEADS, PAGE, SIZE).astype(jnp.bfloat16))
    v = normal(3, *k.shape).astype(jnp.bfloat16)
    q = 0.8 * normal(4, NEW // width, 1, HEADS, 1, SIZE) + 0.3 * normal(5, NEW // width, width, HEADS, GROUP, SIZE)
    q = q.reshape(1, NEW, HEADS, GROUP, SIZE).astype(jnp.bfloat16)
    count, start = jnp.full(1, NEW, jnp.int32), jnp.full(1, context - NEW, jnp.int32)
    view = AttentionView(k, v, table[None], start + NEW, own=count, run=PAGE)
    return q, view, Rows(start, start, count, table[None], start[:, None], jnp.asarray([[0, context + NEW]], jnp.int32))


def main() -> None:
    for context in (16384, 32768, 65536, 131072):
        q, view, rows = inputs(context)
        dense = seconds(jax.jit(lambda q, view, rows: attention(q, (view,), rows.count).out), q, view, rows)
        sparse = seconds(jax.jit(lambda q, view, rows: reader(RULE)(q, (view,), rows).out), q, view, rows)
        place = tiling(RULE, NEW, rows)
        means = [tiles.block_means(view, BLOCK)]
        keep, left = chosen((view,), energies(q, (view,), means, RULE, place), RULE, place)
        share = float(jnp.sum(keep[0]) / jnp.sum(keep[0] | left[0]))
        record("prefill", f"prefill/dense_t{context // 1024}k", dense * 1e3, "ms", None, None)
        record("prefill", f"prefill/blocks_t{context // 1024}k_read{share:.3f}", sparse * 1e3, "ms", dense * 1e3, dense / sparse)


if __name__ == "__main__":
    main()
