"""Attention to keys in pages on the host: rows of one token together, longer ones one by one.

On the host reading lengths costs nothing, so rows are sorted by length and padded within a class of
about equal ones; longer runs of queries go through torch's own attention where it has the options.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tutti.accelerator import scaled_dot_product
from tutti.accelerator.paged_segments import PagedSegments
from tutti.accelerator.products import product
from tutti.accelerator.reference import attention as plain
from tutti.accelerator.reference.attention import WindowKind, first_key
from tutti.accelerator.reference.paged import gather_pages, linear_bias
from tutti.accelerator.registry import Implementation, register
from tutti.accelerator.segments import Segments

PADDING = 1.25  # rows of one class have at most so many times the keys of the shortest


class _Options:
    """What is added to scores, and which keys are seen."""

    def __init__(
        self,
        *,
        scale: float,
        window: int | None = None,
        window_kind: WindowKind = "sliding",
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
        slopes_rounded: bool = False,
        slopes_factor: float = 1.0,
    ) -> None:
        self.scale, self.window, self.window_kind = scale, window, window_kind
        self.soft_cap, self.sinks, self.slopes = soft_cap, sinks, slopes
        self.rounded, self.factor = slopes_rounded, slopes_factor

    def bias(self, positions_s: Tensor) -> Tensor | None:
        """Return what ALiBi adds to keys at positions."""
        if self.slopes is None:
            return None
        return linear_bias(self.slopes, positions_s, rounded=self.rounded, factor=self.factor)

    def first(self, query: int) -> int:
        """Return the first key that a query sees."""
        return first_key(query, self.window, self.window_kind)


def paged_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    steps: PagedSegments,
    *,
    scale: float,
    window: int | None = None,
    window_kind: WindowKind = "sliding",
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    slopes_rounded: bool = False,
    slopes_factor: float = 1.0,
) -> Tensor:
    """Return (T, H, E), as the reference does."""
    options = _Options(
        scale=scale, window=window, window_kind=window_kind, soft_cap=soft_cap, sinks=sinks,
        slopes=slopes, slopes_rounded=slopes_rounded, slopes_factor=slopes_factor,
    )  # fmt: skip
    out = q.new_zeros(q.shape[0], q.shape[1], value_pages.shape[-1])
    queries = np.diff(steps.query_starts.numpy())
    single = np.flatnonzero(queries == 1)
    starts, keys = steps.query_starts.tolist(), steps.key_lengths.tolist()
    for row in np.flatnonzero(queries > 1).tolist():
        start, end = starts[row], starts[row + 1]
        out[start:end] = _run(
            q[start:end], key_pages, value_pages, steps.tables[row], keys[row], options
        )
    if len(single) and compiles(q, key_pages, value_pages, rounded=slopes_rounded):
        one_token_each(
            out, q, key_pages, value_pages, steps, single, scale=scale, window=window,
            window_kind=window_kind, soft_cap=soft_cap, sinks=sinks, slopes=slopes,
            slopes_factor=slopes_factor,
        )  # fmt: skip
        return out
    for rows in _classes(single.tolist(), keys):
        _one_each(out, q, key_pages, value_pages, steps, rows, keys, starts, options)
    return out


def compiles(q: Tensor, key_pages: Tensor, value_pages: Tensor, *, rounded: bool) -> bool:
    """Tell whether the compiled kernel takes a call: it reads bfloat16, and rounds at the end."""
    read = q.dtype in (torch.float32, torch.float64, torch.bfloat16)
    return read and q.dtype == key_pages.dtype == value_pages.dtype and not rounded


def one_token_each(
    out: Tensor,
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    steps: PagedSegments,
    rows: NDArray[np.int64],
    *,
    invariant: bool = False,
    **given: Any,
) -> None:
    """Fill in the attention of rows of one token by the compiled kernel.

    `invariant`: the same bits whatever the pages' size.
    """
    import numba  # here: whoever never comes by need not wait for its import

    options = _Options(**given)
    keys = steps.key_lengths.numpy()
    firsts = np.zeros(len(keys), np.int64)
    if options.window is not None:
        firsts[:] = [options.first(count - 1) for count in keys.tolist()]
    none = torch.empty(0)
    sinks, slopes = (
        (none if tensor is None else tensor.detach()).to(_wide(q.dtype))
        for tensor in (options.sinks, options.slopes)
    )
    to = out if out.dtype == _wide(q.dtype) else out.float()
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    if threads > 1:
        numba.set_num_threads(threads)
    args = (
        to.numpy(), q.detach().to(to.dtype).contiguous().numpy(), _numbers(key_pages),
        _numbers(value_pages),
        steps.tables.numpy(), rows, steps.query_starts.numpy(),
        keys, firsts, options.scale, options.soft_cap or 0.0,
        sinks.numpy(), (slopes * options.factor).numpy(),
    )  # fmt: skip
    together = key_pages.shape[2] if len(rows) >= threads else 1
    if not invariant and to.dtype is torch.float32 and tiles(key_pages, value_pages):
        from tutti.accelerator.host.row_attention import attend_rows

        attend_rows[threads > 1](*args, together)
    else:
        from tutti.accelerator.paged_kernels import one_each

        one_each[threads > 1](*args, not invariant, together)
    if to is not out:
        out.copy_(to)


def compile_kernels(dtype: torch.dtype, width: int) -> None:
    """Compile what rows of one token run, before somebody waits for it.

    It takes many seconds where no cache has it. Neither heads nor lengths matter; types do, and
    whether heads of this width go through the kernel in vectors.
    """
    q, pages = torch.zeros(1, 1, width, dtype=dtype), torch.zeros(2, 4, 1, width, dtype=dtype)
    if compiles(q, pages, pages, rounded=False):
        paged_attention(q, pages, pages, PagedSegments.of((1,), (2,), [[1]], 4), scale=1.0)


def tiles(key_pages: Tensor, value_pages: Tensor) -> bool:
    """Tell whether keys and values go through the kernel in vectors of 16."""
    return all(p.is_contiguous() and p.shape[-1] % 16 == 0 for p in (key_pages, value_pages))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return in what sums are made."""
    return torch.float32 if dtype is torch.bfloat16 else dtype


def _numbers(pages: Tensor) -> Any:
    """Return pages as numpy has them: those in bfloat16 as their bits."""
    return (pages.view(torch.uint16) if pages.dtype is torch.bfloat16 else pages).numpy()


def _classes(rows: list[int], keys: list[int]) -> list[list[int]]:
    """Return rows in classes of about equally many keys."""
    classes: list[list[int]] = []
    for row in sorted(rows, key=lambda row: keys[row]):
        if classes and keys[row] <= max(PADDING * keys[classes[-1][0]], 32):
            classes[-1].append(row)
        else:
            classes.append([row])
    return classes


def _run(
    q: Tensor, key_pages: Tensor, value_pages: Tensor, table: Tensor, keys: int, options: _Options
) -> Tensor:
    """Return the attention of several tokens of one sequence."""
    queries = q.shape[0]
    k = gather_pages(key_pages, table, keys).to(q.dtype)
    v = gather_pages(value_pages, table, keys).to(q.dtype)
    segments = Segments((queries,), (keys,), (0,))
    bias = options.bias(torch.arange(keys))
    extra: dict[str, Any] = {
        "scale": options.scale, "window": options.window, "window_kind": options.window_kind,
        "soft_cap": options.soft_cap, "sinks": options.sinks, "key_bias": bias,
    }  # fmt: skip
    fits = scaled_dot_product.supports(q, k, v, segments, **extra) is None
    own = scaled_dot_product.attention if fits else plain.attention
    return own(q, k, v, segments, **extra)


def _one_each(
    out: Tensor,
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    steps: PagedSegments,
    rows: list[int],
    keys: list[int],
    starts: list[int],
    options: _Options,
) -> None:
    """Fill in the attention of one token of each of some sequences."""
    size, heads = steps.page_size, key_pages.shape[2]
    at = torch.tensor([starts[row] for row in rows])
    lengths = torch.tensor([keys[row] for row in rows])
    first = min(options.first(keys[row] - 1) for row in rows) // size  # pages before: unseen
    tables = steps.tables[torch.tensor(rows)][:, first : -(-keys[rows[-1]] // size)].long()
    positions = torch.arange(first * size, first * size + tables.shape[1] * size)
    k_bgds = key_pages[tables].flatten(1, 2).to(q.dtype).permute(0, 2, 3, 1)
    v_bgse = value_pages[tables].flatten(1, 2).to(q.dtype).transpose(1, 2)
    q_bgnd = q[at].unflatten(1, (heads, -1))
    scores = product(q_bgnd, k_bgds) * options.scale
    wide = scores if scores.dtype == torch.float64 else scores.float()
    if options.soft_cap is not None:
        wide = options.soft_cap * torch.tanh(wide / options.soft_cap)
    bias = options.bias(positions)
    if bias is not None:
        wide = wide + bias.view(heads, -1, bias.shape[-1]).to(wide.dtype)
    seen = positions < lengths.unsqueeze(1)
    if options.window is not None:
        own = lengths.unsqueeze(1) - 1
        near = (
            own - positions < options.window
            if options.window_kind == "sliding"
            else own // options.window == positions // options.window
        )
        seen &= near
    wide = wide.masked_fill(~seen[:, None, None], float("-inf"))
    if options.sinks is not None:
        column = options.sinks.to(wide.dtype).view(1, heads, -1, 1).expand(len(rows), -1, -1, 1)
        weights = torch.softmax(torch.cat((wide, column), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(wide, dim=-1)
    # an unseen place of a page may hold anything, NaN too
    v_bgse = v_bgse.masked_fill(~seen[:, None, :, None], 0.0)
    out[at] = product(weights.to(q.dtype), v_bgse).flatten(1, 2)


def latent_attention(
    q: Tensor, pages: Tensor, steps: PagedSegments, *, rank: int, scale: float
) -> Tensor:
    """Return (T, H, rank), as the reference does."""
    keys = pages.unsqueeze(2)
    return paged_attention(q, keys, keys[..., :rank], steps, scale=scale)


register(
    Implementation(
        operator="paged_attention",
        name="host",
        function=paged_attention,
        devices=("cpu",),
        rank=10,
        exact=False,
        asks_host=True,
    ),
    Implementation(
        operator="latent_attention",
        name="host",
        function=latent_attention,
        devices=("cpu",),
        rank=10,
        exact=False,
        asks_host=True,
    ),
)
