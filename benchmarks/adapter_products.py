"""Time what adapters add to the products of a training step, and other ways to the same sums.

python benchmarks/adapter_products.py llama-3-8b --tokens 8192 --rank 16

Of each product of a block: the product alone, forward and back to its input; the adapter's part
"after" it (the product is written, read and written again) or "before" it (the small product is
written, the large one adds to it as it ends); "joined", the adapter as further columns of the
inner dimension, a bound that asks for inputs with room behind each row; and the small products,
each with the share of the chip's memory rate that it reaches. The last lines add up a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.models.load import load_model

COPIES = 4  # of all tensors, in turn, so that none is found in a cache
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Layer:
    """A product of a block, and the widths of the layers that it is made of."""

    name: str
    width: int
    outs: tuple[int, ...]

    @property
    def out(self) -> int:
        return sum(self.outs)


def layers(model: str) -> list[Layer]:
    """Return the products of a block: queries with keys and values, gates with ups."""
    shapes = {p.name: p.shape for p in load_model(model).parameters(1) if len(p.shape) == 2}
    joined = {
        "qkv": ("attention.query.weight", "attention.key.weight", "attention.value.weight"),
        "out": ("attention.output.weight",),
        "gate, up": ("mlp.gate.weight", "mlp.up.weight"),
        "down": ("mlp.down.weight",),
    }
    return [
        Layer(name, shapes[members[0]][1], tuple(shapes[m][0] for m in members))
        for name, members in joined.items()
    ]


def timed(run: Callable[[int], Any]) -> float:
    """Return µs of one run, as runs follow each other."""
    for copy in range(COPIES):
        run(copy)
    best = float("inf")
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(2 * COPIES):
            run(i % COPIES)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return 1e3 * best / (2 * COPIES)


class Tensors:
    """One copy of what the products of a layer read and write."""

    def __init__(self, layer: Layer, tokens: int, rank: int) -> None:
        def some(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        self.x, self.gradient = some(tokens, layer.width), some(tokens, layer.out)
        self.weight = some(layer.out, layer.width)
        ranks = rank * len(layer.outs)
        self.down = some(ranks, layer.width)
        self.low, self.of_low = some(tokens, ranks), some(tokens, ranks)
        self.ups = [some(out, rank) for out in layer.outs]
        self.wide_x = some(tokens, layer.width + 64)
        self.wide_weight = some(layer.out, layer.width + 64)
        self.y, self.of_x = some(tokens, layer.out), some(tokens, layer.width)
        self.joined_up = torch.block_diag(*(up.float() for up in self.ups)).bfloat16()


def parts(whole: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the columns of each layer."""
    return whole.split(widths, 1)


def variants(layer: Layer, copies: list[Tensors], rank: int) -> dict[str, Callable[[int], Any]]:
    """Return what is timed, by name."""
    ranks = (rank,) * len(layer.outs)

    def small(t: Tensors, y: Tensor, *, adds: bool) -> None:
        for column, low, up in zip(parts(y, layer.outs), parts(t.low, ranks), t.ups, strict=True):
            column.addmm_(low, up.t(), beta=1.0 if adds else 0.0)

    def after(i: int) -> None:
        t = copies[i]
        torch.mm(t.x, t.weight.t(), out=t.y)
        small(t, t.y, adds=True)

    def before(i: int) -> None:
        t = copies[i]
        small(t, t.y, adds=False)
        t.y.addmm_(t.x, t.weight.t())

    def before_joined(i: int) -> None:
        t = copies[i]
        torch.mm(t.low, t.joined_up.t(), out=t.y)
        t.y.addmm_(t.x, t.weight.t())

    def back_after(i: int) -> None:
        t = copies[i]
        torch.mm(t.gradient, t.weight, out=t.of_x)
        t.of_x.addmm_(t.of_low, t.down)

    def back_before(i: int) -> None:
        t = copies[i]
        torch.mm(t.of_low, t.down, out=t.of_x)
        t.of_x.addmm_(t.gradient, t.weight)

    def of_low(i: int) -> None:
        t = copies[i]
        for column, low, up in zip(
            parts(t.gradient, layer.outs), parts(t.of_low, ranks), t.ups, strict=True
        ):
            torch.mm(column, up, out=low)

    def of_ups(i: int) -> list[Tensor]:
        t = copies[i]
        columns = parts(t.gradient, layer.outs)
        return [c.t() @ low for c, low in zip(columns, parts(t.low, ranks), strict=True)]

    def each(act: Callable[[Tensors], Any]) -> Callable[[int], Any]:
        return lambda i: act(copies[i])

    return {
        "forward alone": each(lambda t: torch.mm(t.x, t.weight.t(), out=t.y)),
        "forward after": after,
        "forward before": before,
        "forward before, one up": before_joined,
        "forward joined": each(lambda t: torch.mm(t.wide_x, t.wide_weight.t(), out=t.y)),
        "back alone": each(lambda t: torch.mm(t.gradient, t.weight, out=t.of_x)),
        "back after": back_after,
        "back before": back_before,
        "low": each(lambda t: t.x @ t.down.t()),
        "of low": of_low,
        "of low, one up": each(lambda t: t.gradient @ t.joined_up),
        "of ups": of_ups,
        "of ups, one up": each(lambda t: t.gradient.t() @ t.low),
        "of down": each(lambda t: t.of_low.t() @ t.x),
    }


def read_bytes(name: str, layer: Layer, tokens: int) -> float | None:
    """Return what a small product reads at least, other than factors."""
    if name.startswith(("of low", "of ups")):
        return 2.0 * tokens * layer.out
    return 2.0 * tokens * layer.width if name in ("low", "of down") else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16)
    asked = parser.parse_args()
    num_layers = load_model(asked.model).head_unit - 1
    whole: dict[str, float] = {}
    for layer in layers(asked.model):
        copies = [Tensors(layer, asked.tokens, asked.rank) for _ in range(COPIES)]
        print(f"\n{layer.name}: {layer.width} → {layer.outs}")
        for name, run in variants(layer, copies, asked.rank).items():
            us = timed(run)
            whole[name] = whole.get(name, 0.0) + us
            size = read_bytes(name, layer, asked.tokens)
            rate = "" if size is None else f"  {size / us / 1e6:5.2f} TB/s"
            print(f"{name:24} {us:9.1f} us{rate}")
        del copies
        torch.cuda.empty_cache()
    print(f"\nall {num_layers} blocks, ms of a step")
    for name, us in whole.items():
        print(f"{name:24} {us * num_layers / 1e3:9.1f} ms")


if __name__ == "__main__":
    main()
