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
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from engine_graphs import SETTINGS, add_arguments, batches, make_engine

from tutti.accelerator import open_accelerator

ROUNDS = 12


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, layers=8, vocabulary=8192, micro_batches=1)
    parser.set_defaults(model="llama-3-8b")
    parser.add_argument("--tokens", type=int, default=8192)
    asked = parser.parse_args()
    chip = open_accelerator(asked.device)
    engine, _ = make_engine(asked, asked.tokens, "off", chip)
    (batch,) = batches(engine, asked.tokens, 1)
    blocks = range(1, asked.layers + 1)
    side, least = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=0)
    weights = {u: [o for e in engine.parameters.of_units([u]) for o in e.owners()] for u in blocks}
    others = {u: [[torch.zeros_like(w) for w in weights[u]] for _ in range(3)] for u in blocks}
    factor = torch.ones((), device=chip.device)

    def large_grid(unit: int) -> None:
        chip.operators.adamw(
            [w.data for w in weights[unit]], *others[unit], step=1, settings=SETTINGS,
            gradient_factor=factor,
        )  # fmt: skip

    def few(programs: int) -> Callable[[int], None]:
        def update(unit: int) -> None:
            for i, weight in enumerate(weights[unit]):
                tensors = (weight.data, *(kind[i] for kind in others[unit]))
                _few_programs[(programs,)](*tensors, weight.numel(), num_warps=8)

        return update

    def forward(after: dict[int, torch.cuda.Event] | None = None) -> None:
        engine.passes.forward(0, 1, 0, batch)
        for unit in blocks:
            if after is not None:
                torch.cuda.current_stream().wait_event(after[unit])
            engine.passes.forward(unit, unit + 1, 0, batch)
        engine.passes.forget(range(asked.layers + 1), 0)
        engine.passes.streams.clear()

    def beside(update: Callable[[int], None], stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        done = {}
        with torch.cuda.stream(stream):
            for unit in blocks:
                update(unit)
                done[unit] = stream.record_event()
        forward(done)
        torch.cuda.current_stream().wait_stream(stream)

    def all_of(update: Callable[[int], None]) -> None:
        for unit in blocks:
            update(unit)

    def in_turn(update: Callable[[int], None]) -> None:
        all_of(update)
        forward()

    def timed(action: Callable[[], None]) -> float:
        engine.begin(lambda _: batch)
        taken = []
        for _ in range(ROUNDS):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000)  # the host is ahead
            marks[0].record()
            action()
            marks[1].record()
            torch.cuda.synchronize()
            taken.append(marks[0].elapsed_time(marks[1]))
        return statistics.median(taken[2:])

    updates = {"large grids": large_grid, **{f"{n} programs": few(n) for n in (8, 16, 32, 66, 132)}}
    plain = timed(forward)
    rows = {}
    for name, update in updates.items():
        alone = timed(partial(all_of, update))
        turn = timed(partial(in_turn, update))
        both, low = (timed(partial(beside, update, stream)) for stream in (side, least))
        hidden = (turn - min(both, low)) / alone
        rows[name] = {"alone": alone, "in_turn": turn, "beside": both, "low": low, "hidden": hidden}
        print(
            f"{name:13s} alone {alone:6.2f} ms, forward alone {plain:6.2f}, in turn {turn:6.2f}, "
            f"beside {both:6.2f} ({low:6.2f}): {hidden:.0%} of the update hidden",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    json.dump({"forward_ms": plain, "updates": rows}, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
