"""The Triton kernels of `triton_attend`: one piece of an item, and the merge of an item's pieces.

The only module that needs the package triton; nobody imports it before a kernel is started. Names are those of `gpu_attend`:
`f` its Facts, `cut` its Cut, `form` what `triton_attend.Form` says. Offsets into pools are 64-bit.
"""

import triton
import triton.language as tl

FAR = tl.constexpr(-1e30)  # start of a running maximum: finite, so that no -inf - -inf arises
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NONE = tl.constexpr(float("-inf"))


@triton.jit
def _where(item, f: tl.constexpr):
    """Row, head and query tile of an item."""
    pair = item // f.tiles
    return pair // f.heads, pair % f.heads, item % f.tiles


@triton.jit
def _bound(array, r, h, f: tl.constexpr, axes: tl.constexpr):
    """Entry of a per-row or per-head array i32[R] or i32[R,H]."""
    if axes == 1:
        at = array + r
    else:
        at = array + r * f.heads + h
    return tl.load(at)


@triton.jit
def _span(length, first, r, h, f: tl.constexpr, form: tl.constexpr):
    """Listed tokens [first, length) of a row and head, inside what the row can hold."""
    end = tl.minimum(tl.maximum(_bound(length, r, h, f, form.length), 0), f.tokens)
    if form.first > 0:
        start = tl.maximum(_bound(first, r, h, f, form.first), 0)
    else:
        start = end * 0
    return start, end


@triton.jit
def _extent(length, first, own, item, f: tl.constexpr, form: tl.constexpr, cut: tl.constexpr):
    """Token blocks of an item, and blocks of each of its pieces but the last."""
    r, h, tile = _where(item, f)
    start, end = _span(length, first, r, h, f, form)
    if form.own > 0:
        last = tl.minimum(((tile + 1) * f.tile - 1) // f.group, f.new - 1)
        end = tl.minimum(end, end - tl.load(own + r) + last + 1)
    blocks = tl.maximum((end - start + (f.block - 1)) // f.block, 0)
    count = tl.minimum((blocks + 1) // 2, cut.pieces)
    count = tl.maximum(tl.maximum(count, (blocks + (cut.longest - 1)) // cut.longest), 1)
    return blocks, tl.maximum((blocks + count - 1) // count, 1)


@triton.jit
def _place(ids, r, h, j, live, f: tl.constexpr, form: tl.constexpr):
    """Token row of a pool [N*H*P,D] that listed tokens j lie in: entries of head pages name it, those of pages all but the head."""
    at = j // f.run
    if form.ids == 2:
        at += r * f.entries
        entry = tl.load(ids + at, mask=live, other=0)
        entry = tl.minimum(tl.maximum(entry, 0), f.pages * (f.page // f.run) - 1)
        piece = entry % (f.page // f.run)
        spot = ((entry // (f.page // f.run)) * f.heads + h) * f.page + piece * f.run
    else:
        at += (r * f.heads + h) * f.entries
        entry = tl.load(ids + at, mask=live, other=0)
        spot = tl.minimum(tl.maximum(entry, 0), f.pages * f.heads * (f.page // f.run) - 1) * f.run
    return spot + j % f.run


@triton.jit
def _rows(pool, spot, live, size: tl.constexpr, wide: tl.constexpr):
    """Token rows [B, wide] of a pool; what is not live, or past `size`, is 0."""
    d = tl.arange(0, wide)[None, :]
    at = spot.to(tl.int64)[:, None] * size + d
    if size == wide:
        mask = live[:, None]
    else:
        mask = live[:, None] & (d < size)
    return tl.load(pool + at, mask=mask, other=0.0)


@triton.jit
def _logits(q, k, length, own, bias, pos, q_pos, spot, t, r, h, j, live, f: tl.constexpr, form: tl.constexpr):
    """Masked logits times log2(e), f32[B_q,B_k], of query rows at new tokens t against keys k of listed tokens j."""
    s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="tf32x3")
    if f.softcap is None:
        s *= f.scale * LOG2E
    else:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
        s = f.softcap * LOG2E * (1.0 - 2.0 / (tl.exp2(s * (2 * f.scale / f.softcap * LOG2E)) + 1.0))
    if form.bias > 0:
        at = tl.cast(r * f.heads + h, tl.int64) * f.tokens + j
        s += (tl.load(bias + at, mask=live, other=0.0) * LOG2E)[None, :]
    seen = live[None, :]
    if form.own > 0:
        last = _bound(length, r, h, f, form.length) - tl.load(own + r) + t
        seen = seen & (j[None, :] <= last[:, None])
    if form.pos > 0:
        at = tl.load(q_pos + r * f.new + tl.minimum(t, f.new - 1))[:, None]
        place = tl.load(pos + spot, mask=live, other=0)[None, :]
        seen = seen & (place <= at)
        if f.window is not None:
            seen = seen & (place > at - f.window)
    return tl.where(seen, s, NONE)


@triton.jit
def _piece(
    q, k, v, ids, length, first, own, bias, pos, q_pos, part, lse, item, n, f: tl.constexpr, form: tl.constexpr, cut: tl.constexpr
):  # fmt: skip
    """Attend one item's query tile to its n-th piece, if it has one; leave the partial."""
    r, h, tile = _where(item, f)
    blocks, piece = _extent(length, first, own, item, f, form, cut)
    row = tl.arange(0, f.tile)
    m = tile * f.tile + row
    real = (m < f.new * f.group) & (n * piece < blocks)
    t, g = m // f.group, m % f.group
    d = tl.arange(0, form.wide)[None, :]
    at = ((r * f.new + t) * f.heads + h) * f.group + g
    query = tl.load(q + at[:, None] * f.size + d, mask=real[:, None] & (d < f.size), other=0.0)
    start, end = _span(length, first, r, h, f, form)
    top = tl.full((f.tile,), FAR, tl.float32)
    total = tl.full((f.tile,), 0.0, tl.float32)
    acc = tl.full((f.tile, form.deep), 0.0, tl.float32)
    for b in range(n * piece, tl.minimum((n + 1) * piece, blocks)):
        j = start + b * f.block + tl.arange(0, f.block)
        live = j < end
        spot = _place(ids, r, h, j, live, f, form)
        key = _rows(k, spot, live, f.size, form.wide)
        s = _logits(query, key, length, own, bias, pos, q_pos, spot, t, r, h, j, live, f, form)
        value = _rows(v, spot, live, form.values, form.deep).to(query.dtype)
        high = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - high[:, None])
        fade = tl.exp2(top - high)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(query.dtype), value, acc * fade[:, None], input_precision="tf32x3")
        top = high
    some = total > 0
    total = tl.where(some, total, 1.0)
    slot = tl.cast(item * cut.slots + n, tl.int64) * form.rows + row
    d = tl.arange(0, form.deep)[None, :]
    tl.store(lse + slot, tl.where(some, top + tl.log2(total), NONE), mask=real)
    tl.store(part + slot[:, None] * form.values + d, acc / total[:, None], mask=real[:, None] & (d < form.values))


@triton.jit
def split(
    q, k, v, ids, length, first, own, bias, pos, q_pos, part, lse,
    f: tl.constexpr, form: tl.constexpr, cut: tl.constexpr, programs: tl.constexpr,
):  # fmt: skip
    """Every piece, all first pieces before all second ones, as `gpu_attend` orders them."""
    i = tl.program_id(0)
    if f.items * cut.slots <= programs:
        _piece(q, k, v, ids, length, first, own, bias, pos, q_pos, part, lse, i % f.items, i // f.items, f, form, cut)
    else:
        for at in range(i, f.items * cut.slots, programs):
            _piece(q, k, v, ids, length, first, own, bias, pos, q_pos, part, lse, at % f.items, at // f.items, f, form, cut)


@triton.jit
def merge(
    length, first, own, part, lse, out, out_lse, f: tl.constexpr, form: tl.constexpr, cut: tl.constexpr, some: tl.constexpr
):  # fmt: skip
    """One query row of an item: its partials, `some` at a time, by log-sum-exp."""
    item, row = tl.program_id(0), tl.program_id(1)
    r, h, tile = _where(item, f)
    m = tile * f.tile + row
    blocks, piece = _extent(length, first, own, item, f, form, cut)
    pieces = (blocks + piece - 1) // piece
    d = tl.arange(0, form.deep)
    top = tl.full((), FAR, tl.float32)
    mass = tl.full((), 0.0, tl.float32)
    acc = tl.full((form.deep,), 0.0, tl.float32)
    for c in range(0, pieces, some):
        n = c + tl.arange(0, some)
        slot = tl.cast(item * cut.slots + n, tl.int64) * form.rows + row
        s = tl.load(lse + slot, mask=n < pieces, other=NONE)
        mask = (n < pieces)[:, None] & (d < form.values)[None, :]
        o = tl.load(part + slot[:, None] * form.values + d[None, :], mask=mask, other=0.0)
        high = tl.maximum(top, tl.max(s, 0))
        w = tl.exp2(s - high)
        fade = tl.exp2(top - high)
        mass = mass * fade + tl.sum(w, 0)
        acc = acc * fade + tl.sum(w[:, None] * o, 0)
        top = high
    real = m < f.new * f.group
    whole = tl.where(mass > 0, mass, 1.0)
    at = ((r * f.new + m // f.group) * f.heads + h) * f.group + m % f.group
    tl.store(out + at * form.values + d, (acc / whole).to(out.dtype.element_ty), mask=real & (d < form.values))
    tl.store(out_lse + at, tl.where(mass > 0, (top + tl.log2(whole)) * LN2, NONE), mask=real)
