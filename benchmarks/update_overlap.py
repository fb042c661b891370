"""The optimizer's update beside the next step's forward passes: what that would hide.

    python benchmarks/update_overlap.py          # on a machine with a GPU, about 40 s

Some blocks of a model go forward while their parameters are updated on a lane of its own, rising,
a block's forward behind its own update: as if the end of a step ran beside the beginning of the
next. Beside it the two in turn, and each alone. Large grids take the chip from the products for as
long as they last, few programs that stay take a part of it for longer: both are timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from engine_graphs import SETTINGS, add_arguments, batches, make_engine

from tutti.accelerator import open_accelerator

ROUNDS = 12
Update = Callable[[int], None]  # of a unit's parameters


@triton.jit
def _few_programs(weight, gradient, mean, square, size):  # type: ignore[no-untyped-def]
    """Update a tensor by as many programs as there are, each looping over blocks."""
    for at in range(tl.program_id(0) * 4096, size, tl.num_programs(0) * 4096):
        places = at + tl.arange(0, 4096)
        inside = places < size
        g = tl.load(gradient + places, mask=inside).to(tl.float32)
        m = 0.9 * tl.load(mean + places, mask=inside).to(tl.float32) + 0.1 * g
        v = 0.95 * tl.load(square + places, mask=inside).to(tl.float32) + 0.05 * g * g
        w = tl.load(weight + places, mask=inside).to(tl.float32)
        tl.store(mean + places, m, mask=inside)
        tl.store(square + places, v, mask=inside)
        tl.store(weight + places, w * 0.99999 - 1e-9 * m / (tl.sqrt(v) + 1e-8), mask=inside)


class Comparison:
    """Blocks that go forward, and what is updated in turn with them or beside them."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.chip = open_accelerator(asked.device)
        self.engine, _ = make_engine(asked, asked.tokens, "off", self.chip)
        (self.batch,) = batches(self.engine, asked.tokens, 1)
        self.blocks = range(1, asked.layers + 1)
        found = {u: self.engine.parameters.of_units([u]) for u in self.blocks}
        self.weights = {u: [o.data for e in found[u] for o in e.owners()] for u in self.blocks}
        self.others = {  # gradients and both moments
            u: [[torch.zeros_like(w) for w in self.weights[u]] for _ in range(3)]
            for u in self.blocks
        }
        self.factor = torch.ones((), device=self.chip.device)

    def large_grid(self, unit: int) -> None:
        """Update as the engine does: as many programs as there are blocks of elements."""
        self.chip.operators.adamw(
            self.weights[unit], *self.others[unit], step=1, settings=SETTINGS,
            gradient_factor=self.factor,
        )  # fmt: skip

    def few_programs(self, programs: int, unit: int) -> None:
        """Update by programs that stay."""
        for i, weight in enumerate(self.weights[unit]):
            tensors = (weight, *(kind[i] for kind in self.others[unit]))
            _few_programs[(programs,)](*tensors, weight.numel(), num_warps=8)

    def forward(self, after: dict[int, torch.cuda.Event] | None = None) -> None:
        """Go forward, each block behind its event."""
        passes = self.engine.passes
        passes.forward(0, 1, 0, self.batch)
        for unit in self.blocks:
            if after is not None:
                torch.cuda.current_stream().wait_event(after[unit])
            passes.forward(unit, unit + 1, 0, self.batch)
        passes.forget(range(self.blocks.stop), 0)
        passes.streams.clear()

    def update_all(self, update: Update) -> None:
        for unit in self.blocks:
            update(unit)

    def in_turn(self, update: Update) -> None:
        self.update_all(update)
        self.forward()

    def beside(self, update: Update, stream: torch.cuda.Stream) -> None:
        """Update on a stream of its own, rising, while blocks go forward."""
        stream.wait_stream(torch.cuda.current_stream())
        done = {}
        with torch.cuda.stream(stream):
            for unit in self.blocks:
                update(unit)
                done[unit] = stream.record_event()
        self.forward(done)
        torch.cuda.current_stream().wait_stream(stream)

    def timed(self, action: Callable[[], None]) -> float:
        """Return the milliseconds of an action that the host has issued ahead."""
        self.engine.begin(lambda _: self.batch)
        taken = []
        for _ in range(ROUNDS):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000)
            marks[0].record()
            action()
            marks[1].record()
            torch.cuda.synchronize()
            taken.append(marks[0].elapsed_time(marks[1]))
        return statistics.median(taken[2:])

    def row(self, update: Update, streams: Sequence[torch.cuda.Stream]) -> dict[str, float]:
        """Return one kind of update alone, in turn and beside, and the share that hides."""
        alone = self.timed(partial(self.update_all, update))
        turn = self.timed(partial(self.in_turn, update))
        both, low = (self.timed(partial(self.beside, update, stream)) for stream in streams)
        hidden = (turn - min(both, low)) / alone
        return {"alone": alone, "in_turn": turn, "beside": both, "low": low, "hidden": hidden}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, layers=8, vocabulary=8192, micro_batches=1)
    parser.set_defaults(model="llama-3-8b")
    parser.add_argument("--tokens", type=int, default=8192)
    compared = Comparison(parser.parse_args())
    streams = [torch.cuda.Stream(priority=priority) for priority in (-1, 0)]
    updates: dict[str, Update] = {"large grids": compared.large_grid}
    updates |= {f"{n} programs": partial(compared.few_programs, n) for n in (8, 16, 32, 66, 132)}
    plain = compared.timed(compared.forward)
    rows = {}
    for name, update in updates.items():
        rows[name] = row = compared.row(update, streams)
        print(
            f"{name:13s} alone {row['alone']:6.2f} ms, forward alone {plain:6.2f}, in turn "
            f"{row['in_turn']:6.2f}, beside {row['beside']:6.2f} ({row['low']:6.2f}): "
            f"{row['hidden']:.0%} of the update hidden",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    json.dump({"forward_ms": plain, "updates": rows}, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
