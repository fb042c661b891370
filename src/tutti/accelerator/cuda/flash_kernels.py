"""The kernels of flash attention with every mask, cap, bias and sink.

Programs walk over tiles: a run of queries (or keys) of one segment. Which they are stands in a
small table on the device. Backward computes scores anew from the kept log of their sum; gradients
of keys and of queries are two kernels, so that nothing is added in an undefined order.

Letters: M queries of a tile, N keys of a tile, D width of queries and keys, E width of values.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp2(-2.0 * LOG2E * x)) - 1.0


@triton.jit
def _seen(
    own, other, num_keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return which keys queries see, by their positions in the sequence."""
    seen = (other < num_keys) & (own >= 0)
    if CAUSAL:
        seen = seen & (other <= own)
    if WINDOW == 1:
        seen = seen & (own - other < window)
    if WINDOW == 2:
        seen = seen & (own // window == other // window)
    return seen


@triton.jit
def _key_range(
    first, last, num_keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the keys, in whole tiles, that queries at positions first … last may see."""
    low, high = 0, num_keys
    if CAUSAL:
        high = min(high, last + 1)
    if WINDOW == 1:
        low = max(low, first - window + 1)
    if WINDOW == 2:
        low = first // window * window
        high = min(high, (last // window + 1) * window)
    return low // BLOCK_N * BLOCK_N, high


@triton.jit
def forward(
    q, k, v, out, lse, tiles, sinks, bias, q_row, q_head, k_row, k_head, v_row, v_head, out_row,
    out_head, lse_head, bias_head, scale, cap, window,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a tile of queries, and the log₂ of their sums of exponentials."""
    table, head = tiles + tl.program_id(0) * 5, tl.program_id(1).to(tl.int64)
    query, num_q = tl.load(table).to(tl.int64), tl.load(table + 1)
    key, num_k = tl.load(table + 2).to(tl.int64), tl.load(table + 3)
    position = tl.load(table + 4)
    row, d, e, column = tl.arange(0, M), tl.arange(0, WIDE_D), tl.arange(0, WIDE_E), tl.arange(0, N)
    inside = row < num_q
    own = tl.where(inside, position + row, -1)
    q_md = tl.load(
        q + (query + row)[:, None] * q_row + head * q_head + d[None, :],
        mask=inside[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    k += key * k_row + (head // GROUP) * k_head
    v += key * v_row + (head // GROUP) * v_head
    most = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    if HAS_SINK:
        most = tl.zeros((M,), tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
        total += 1.0
    collected = tl.zeros((M, WIDE_E), tl.float32)
    last = position + min(M, num_q) - 1
    low, high = _key_range(position, last, num_k, window, CAUSAL, WINDOW, N)
    for start in range(low, high, N):
        other = start + column
        k_dn = tl.load(
            k + other[None, :].to(tl.int64) * k_row + d[:, None],
            mask=(other < num_k)[None, :] & (d < D)[:, None], other=0.0,
        )  # fmt: skip
        s = tl.dot(q_md, k_dn) * scale
        if HAS_CAP:
            s = cap * _tanh(s / cap)
        if HAS_BIAS:
            near = tl.load(bias + head * bias_head + key + other, mask=other < num_k, other=0.0)
            s += near.to(tl.float32)[None, :]
        seen = _seen(own[:, None], other[None, :], num_k, window, CAUSAL, WINDOW)
        s = tl.where(seen, s * LOG2E, float("-inf"))
        new = tl.maximum(most, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(p, 1)
        v_ne = tl.load(
            v + other[:, None].to(tl.int64) * v_row + e[None, :],
            mask=(other < num_k)[:, None] & (e < E)[None, :], other=0.0,
        )  # fmt: skip
        collected = collected * shrink[:, None] + tl.dot(p.to(v_ne.dtype), v_ne)
        most = new
    safe = tl.where(total > 0.0, total, 1.0)
    collected = collected / safe[:, None]
    places = out + (query + row)[:, None] * out_row + head * out_head + e[None, :]
    tl.store(places, collected, mask=inside[:, None] & (e < E)[None, :])
    tl.store(lse + head * lse_head + query + row, most + tl.log2(safe), mask=inside)


@triton.jit
def _scores(s, bias_row, scale, cap, lse, seen, HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return the probabilities, and by how much a score moves with its product."""
    s = s * scale
    slope = tl.zeros_like(s) + 1.0
    if HAS_CAP:
        bent = _tanh(s / cap)
        s = cap * bent
        slope = 1.0 - bent * bent
    if HAS_BIAS:
        s += bias_row
    return tl.where(seen, tl.exp2(s * LOG2E - lse), 0.0), slope


@triton.jit
def backward_queries(
    q, k, v, grad, delta, lse, grad_q, tiles, bias, q_row, q_head, k_row, k_head, v_row, v_head,
    grad_row, grad_head, grad_q_row, grad_q_head, lse_head, bias_head, scale, cap, window,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile of queries."""
    table, head = tiles + tl.program_id(0) * 5, tl.program_id(1).to(tl.int64)
    query, num_q = tl.load(table).to(tl.int64), tl.load(table + 1)
    key, num_k = tl.load(table + 2).to(tl.int64), tl.load(table + 3)
    position = tl.load(table + 4)
    row, d, e, column = tl.arange(0, M), tl.arange(0, WIDE_D), tl.arange(0, WIDE_E), tl.arange(0, N)
    inside = row < num_q
    own = tl.where(inside, position + row, -1)
    q_md = tl.load(
        q + (query + row)[:, None] * q_row + head * q_head + d[None, :],
        mask=inside[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    g_me = tl.load(
        grad + (query + row)[:, None] * grad_row + head * grad_head + e[None, :],
        mask=inside[:, None] & (e < E)[None, :], other=0.0,
    )  # fmt: skip
    lse_m = tl.load(lse + head * lse_head + query + row, mask=inside, other=0.0)
    delta_m = tl.load(delta + head * lse_head + query + row, mask=inside, other=0.0)
    k += key * k_row + (head // GROUP) * k_head
    v += key * v_row + (head // GROUP) * v_head
    collected = tl.zeros((M, WIDE_D), tl.float32)
    last = position + min(M, num_q) - 1
    low, high = _key_range(position, last, num_k, window, CAUSAL, WINDOW, N)
    for start in range(low, high, N):
        other = start + column
        there = other < num_k
        k_nd = tl.load(
            k + other[:, None].to(tl.int64) * k_row + d[None, :],
            mask=there[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        v_en = tl.load(
            v + other[None, :].to(tl.int64) * v_row + e[:, None],
            mask=there[None, :] & (e < E)[:, None], other=0.0,
        )  # fmt: skip
        near = other.to(tl.float32)[None, :]
        if HAS_BIAS:
            near = tl.load(bias + head * bias_head + key + other, mask=there, other=0.0)
            near = near.to(tl.float32)[None, :]
        seen = _seen(own[:, None], other[None, :], num_k, window, CAUSAL, WINDOW)
        p, slope = _scores(
            tl.dot(q_md, tl.trans(k_nd)), near, scale, cap, lse_m[:, None], seen, HAS_CAP, HAS_BIAS
        )
        ds = p * (tl.dot(g_me, v_en) - delta_m[:, None]) * slope
        collected += tl.dot(ds.to(k_nd.dtype), k_nd)
    places = grad_q + (query + row)[:, None] * grad_q_row + head * grad_q_head + d[None, :]
    tl.store(places, collected * scale, mask=inside[:, None] & (d < D)[None, :])


@triton.jit
def backward_keys(
    q, k, v, grad, delta, lse, grad_k, grad_v, tiles, bias, q_row, q_head, k_row, k_head, v_row,
    v_head, grad_row, grad_head, grad_k_row, grad_k_head, grad_v_row, grad_v_head, lse_head,
    bias_head, scale, cap, window,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile of keys and of its values."""
    table, group = tiles + tl.program_id(0) * 6, tl.program_id(1).to(tl.int64)
    key, num_k = tl.load(table).to(tl.int64), tl.load(table + 1)  # keys from here to the end
    query, num_q = tl.load(table + 2).to(tl.int64), tl.load(table + 3)
    place, offset = tl.load(table + 4), tl.load(table + 5)  # of the first key; of query 0
    row, d, e, column = tl.arange(0, M), tl.arange(0, WIDE_D), tl.arange(0, WIDE_E), tl.arange(0, N)
    there = column < num_k
    other = place + column
    k_nd = tl.load(
        k + (key + column)[:, None] * k_row + group * k_head + d[None, :],
        mask=there[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    v_ne = tl.load(
        v + (key + column)[:, None] * v_row + group * v_head + e[None, :],
        mask=there[:, None] & (e < E)[None, :], other=0.0,
    )  # fmt: skip
    sum_k = tl.zeros((N, WIDE_D), tl.float32)
    sum_v = tl.zeros((N, WIDE_E), tl.float32)
    low, high = 0, num_q
    last = place + min(N, num_k) - 1
    if CAUSAL:
        low = max(0, place - offset)
    if WINDOW == 1:
        high = min(high, last + window - offset)
    if WINDOW == 2:
        low = max(low, place // window * window - offset)
        high = min(high, (last // window + 1) * window - offset)
    low = low // M * M
    for h in range(GROUP):
        head = group * GROUP + h
        near = other.to(tl.float32)[:, None]
        if HAS_BIAS:
            near = tl.load(bias + head * bias_head + key + column, mask=there, other=0.0)
            near = near.to(tl.float32)[:, None]
        for start in range(low, high, M):
            at = start + row
            inside = at < num_q
            own = tl.where(inside, offset + at, -1)
            q_md = tl.load(
                q + (query + at)[:, None] * q_row + head * q_head + d[None, :],
                mask=inside[:, None] & (d < D)[None, :], other=0.0,
            )  # fmt: skip
            g_me = tl.load(
                grad + (query + at)[:, None] * grad_row + head * grad_head + e[None, :],
                mask=inside[:, None] & (e < E)[None, :], other=0.0,
            )  # fmt: skip
            lse_m = tl.load(lse + head * lse_head + query + at, mask=inside, other=0.0)
            delta_m = tl.load(delta + head * lse_head + query + at, mask=inside, other=0.0)
            seen = _seen(own[None, :], other[:, None], place + num_k, window, CAUSAL, WINDOW)
            p, slope = _scores(
                tl.dot(k_nd, tl.trans(q_md)), near, scale, cap, lse_m[None, :], seen,
                HAS_CAP, HAS_BIAS,
            )  # fmt: skip
            sum_v += tl.dot(p.to(g_me.dtype), g_me)
            ds = p * (tl.dot(v_ne, tl.trans(g_me)) - delta_m[None, :]) * slope
            sum_k += tl.dot(ds.to(q_md.dtype), q_md)
    places = (key + column)[:, None]
    tl.store(
        grad_k + places * grad_k_row + group * grad_k_head + d[None, :], sum_k * scale,
        mask=there[:, None] & (d < D)[None, :],
    )  # fmt: skip
    tl.store(
        grad_v + places * grad_v_row + group * grad_v_head + e[None, :], sum_v,
        mask=there[:, None] & (e < E)[None, :],
    )  # fmt: skip
