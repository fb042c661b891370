"""Operators as a server runs them: fixed weights, one token or many, keys in pages, in a graph.

Kernel by kernel an operator on a few rows takes as long as the host needs to issue it; a server's
steps run as graphs where the chip has such, so that is how its operators are timed: many calls in
one graph, in turns over copies of their tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator
from tutti.accelerator.host import rows
from tutti.accelerator.operators import Operators
from tutti.accelerator.paged_segments import PagedSegments
from tutti.accelerator.prepared import MANY, panels_of
from tutti.accelerator.profiling.cases import (
    EPS,
    Prepared,
    ProfileCase,
    in_turns,
    trained_maker,
)
from tutti.accelerator.profiling.timer import Run
from tutti.accelerator.profiling.workspace import Workspace
from tutti.accelerator.quantised import quantise
from tutti.batching.step_sizes import keys_for

PAGE_SIZE = 16
MOST_COPIES = 32
CALLS = 24  # of a graph, at least
LONGEST = 1 << 20  # keys that a table may have room for
ONE_TOKEN = 8  # rows that are taken to be of one token: it has as many experts

ServedMaker = Callable[[tuple[int, ...], Workspace, Operators], tuple[Run, str]]


def prepare_served(case: ProfileCase, space: Workspace, accelerator: Accelerator) -> Prepared:
    """Return how to run a case: a graph of many calls, or one call where there are no graphs."""
    operators = accelerator.operators.as_serving()
    rows.hurry()
    size = max(1.0, case.elements * space.element_bytes)
    copies = max(1, min(MOST_COPIES, math.ceil(space.cache_bytes / size)))
    make = _MAKERS.get(case.operator) or _forward_of(case.operator)
    each = [make(case.shape, space, operators) for _ in range(copies)]
    runs, kernel = [run for run, _ in each], each[0][1]
    pool = accelerator.graph_pool()
    if pool is None:
        return Prepared({"inference": _without_gradients(in_turns(runs))}, kernel)
    calls = copies * math.ceil(CALLS / copies)

    @torch.no_grad()
    def every() -> None:
        for index in range(calls):
            runs[index % copies]()

    replay = accelerator.capture(every, pool=pool, warm_ups=1)
    if replay is None:
        return Prepared({"inference": _without_gradients(in_turns(runs))}, kernel)

    def run(_kept: Sequence[Run] = runs) -> Any:  # a graph does not own what it reads
        return replay()

    return Prepared({"inference": run}, kernel, calls)


def _without_gradients(run: Run) -> Run:
    @torch.no_grad()
    def call() -> Any:
        return run()

    return call


def _forward_of(operator: str) -> ServedMaker:
    """Return what training's forward pass runs, where a server runs the same."""
    make = trained_maker(operator)

    def made(shape: tuple[int, ...], space: Workspace, operators: Operators) -> tuple[Run, str]:
        prepared = make(shape, space, operators)
        return prepared.runs["forward"], prepared.kernel

    return made


def _named(operators: Operators, name: str, *args: Any, **options: Any) -> str:
    with torch.no_grad():
        return operators.chosen(name, *args, **options).name


# --- products --------------------------------------------------------------------------------


def _linear(shape: tuple[int, ...], space: Workspace, operators: Operators) -> tuple[Run, str]:
    tokens, out, wide = shape
    x, w = space.take(tokens, wide, gradient=False), space.take(out, wide, gradient=False)
    operators.prepare(w)
    if tokens < MANY:
        panels_of(w, now=True)  # as whoever serves for a while has them
    return lambda: operators.linear(x, w), _named(operators, "linear", x, w)


def _quantised_linear(kind: str) -> ServedMaker:
    def make(shape: tuple[int, ...], space: Workspace, operators: Operators) -> tuple[Run, str]:
        tokens, out, wide = shape
        x = space.take(tokens, wide, gradient=False)
        weight = quantise(space.take(out, wide, gradient=False), kind)
        assert weight is not None
        operators.prepare(weight)
        kernel = _named(operators, "quantised_linear", x, weight, None)
        return lambda: operators.quantised_linear(x, weight), kernel

    return make


def _grouped_linear(
    shape: tuple[int, ...], space: Workspace, operators: Operators
) -> tuple[Run, str]:
    rows, out, wide, experts = shape
    chosen = torch.randint(0, experts, (rows,), generator=torch.Generator().manual_seed(rows))
    if rows <= min(experts, ONE_TOKEN):  # of one token: they are all different
        chosen = torch.randperm(experts, generator=torch.Generator().manual_seed(rows))[:rows]
    counts = torch.bincount(chosen, minlength=experts).to(space.device)
    x = space.take(rows, wide, gradient=False)
    w = space.take(experts, out, wide, gradient=False)
    kernel = _named(operators, "grouped_linear", x, w, counts)
    return lambda: operators.grouped_linear(x, w, counts), kernel


# --- keys in pages ---------------------------------------------------------------------------


def _paged(queries: Sequence[int], keys: int, pages: int, device: torch.device) -> PagedSegments:
    """Return rows that look at as many keys each, their pages anywhere among the others."""
    each = math.ceil(keys / PAGE_SIZE)
    order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(keys)) + 1
    tables = order[: len(queries) * each].view(len(queries), each).tolist()
    segments = PagedSegments.of(queries, [keys] * len(queries), tables, PAGE_SIZE, device)
    bound = keys_for(keys, LONGEST)
    width = math.ceil(bound / PAGE_SIZE)
    wide = torch.zeros(len(queries), width, dtype=torch.int32, device=device)
    wide[:, :each] = segments.tables
    return replace(segments, tables=wide, most_keys=bound)


def _attention(queries: Sequence[int], keys: int, shape: tuple[int, ...]) -> ServedMaker:
    heads, kv_heads, head_dim, value_dim = shape

    def make(_: tuple[int, ...], space: Workspace, operators: Operators) -> tuple[Run, str]:
        pages = len(queries) * math.ceil(keys / PAGE_SIZE) + 1
        segments = _paged(queries, keys, pages, space.device)
        singles = len(queries) if queries[0] == 1 else 0
        first = torch.full((1,), singles, dtype=torch.int32, device=space.device)
        segments = replace(segments, first_long=first, most_long=len(queries) - singles)
        args = (
            space.take(sum(queries), heads, head_dim, gradient=False),
            space.take(pages, PAGE_SIZE, kv_heads, head_dim, gradient=False),
            space.take(pages, PAGE_SIZE, kv_heads, value_dim, gradient=False),
            segments,
        )
        options = {"scale": head_dim**-0.5}
        kernel = _named(operators, "paged_attention", *args, **options)
        return lambda: operators.paged_attention(*args, **options), kernel

    return make


def _decode_attention(
    shape: tuple[int, ...], space: Workspace, operators: Operators
) -> tuple[Run, str]:
    rows, keys, *heads = shape
    return _attention([1] * rows, keys, tuple(heads))(shape, space, operators)


def _chunk_attention(
    shape: tuple[int, ...], space: Workspace, operators: Operators
) -> tuple[Run, str]:
    tokens, before, *heads = shape
    return _attention([tokens], before + tokens, tuple(heads))(shape, space, operators)


def _store_heads(*, normed: bool) -> ServedMaker:
    def make(shape: tuple[int, ...], space: Workspace, operators: Operators) -> tuple[Run, str]:
        tokens, heads, kv_heads, dim = shape
        x = space.take(tokens, heads + 2 * kv_heads, dim, gradient=False)
        angles = torch.rand(tokens, dim // 2, device=space.device)
        cos, sin = angles.cos(), angles.sin()
        pages = [
            torch.zeros(
                math.ceil(tokens / PAGE_SIZE) + 1,
                PAGE_SIZE,
                kv_heads,
                dim,
                dtype=x.dtype,
                device=space.device,
            )
            for _ in range(2)
        ]
        places = PAGE_SIZE + torch.randperm(tokens, device=space.device)
        norms = [space.take(dim, gradient=False) for _ in range(2)] if normed else [None, None]
        if operators.stores_heads():
            options: dict[str, Any] = {
                "heads": heads, "kv_heads": kv_heads, "eps": EPS,
                "query_norm": norms[0], "key_norm": norms[1],
            }  # fmt: skip
            args = (x, cos, sin, *pages, places)
            kernel = _named(operators, "store_heads", *args, **options)
            return lambda: operators.store_heads(*args, **options), kernel

        def in_parts() -> None:
            q, k, v = _placed(operators, x, cos, sin, heads, kv_heads, norms)
            del q
            operators.store_pages(k, v, pages[0], pages[1], places)

        return in_parts, "in parts"

    return make


def _placed(
    operators: Operators,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    norms: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, normed and rotated, and values: what a block does by itself."""
    if norms[0] is None:
        return operators.split_rotary(x, cos, sin, heads=heads, kv_heads=kv_heads)
    both, v = x.split([heads + kv_heads, kv_heads], dim=1)
    parts = [
        operators.rms_norm(part, weight, eps=EPS)
        for part, weight in zip(both.split([heads, kv_heads], dim=1), norms, strict=True)
    ]
    both = operators.rotary(torch.cat(parts, dim=1), cos, sin)
    q, k = both.split([heads, kv_heads], dim=1)
    return q, k, v


def _sample(shape: tuple[int, ...], space: Workspace, operators: Operators) -> tuple[Run, str]:
    rows, vocabulary = shape
    logits = space.take(rows, vocabulary, gradient=False)
    ones = torch.ones(rows, device=space.device)
    whole = torch.arange(rows, device=space.device)
    options: dict[str, Any] = {
        "temperature": ones, "top_k": whole * 0, "top_p": ones, "min_p": ones * 0.0,
        "seeds": whole, "positions": whole, "cuts": False,
        "draws": operators.preferred("sample")[0] != "reference",
    }  # fmt: skip
    kernel = _named(operators, "sample", logits, **options)
    return lambda: operators.sample(logits, **options), kernel


_MAKERS: dict[str, ServedMaker] = {
    "linear": _linear,
    "fp8_linear": _quantised_linear("fp8"),
    "int8_linear": _quantised_linear("int8"),
    "grouped_linear": _grouped_linear,
    "decode_attention": _decode_attention,
    "chunk_attention": _chunk_attention,
    "store_heads": _store_heads(normed=False),
    "store_normed_heads": _store_heads(normed=True),
    "sample": _sample,
}
