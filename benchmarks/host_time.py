"""What the host needs to issue a training step, and where that goes.

    python benchmarks/host_time.py            # on a machine with a GPU, about 20 s
    python benchmarks/host_time.py --graphs --model smollm2-135m

So few tokens that the chip waits for the host: a step then takes what its Python takes. Prints
microseconds per block and micro-batch, with and without the garbage collector, and the functions
that have the most of it. With --graphs: what is left of a block's time where blocks run as graphs,
from steps of few and of many blocks.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time

from engine_graphs import SETTINGS, add_arguments, batches, make_engine

from tutti.accelerator import Accelerator, open_accelerator
from tutti.train.graphs.captured_blocks import CaptureMode

FEW, MANY = 4, 24  # blocks


def block_us(asked: argparse.Namespace, mode: CaptureMode, chip: Accelerator) -> float:
    """Return the microseconds of a block and micro-batch, all else taken off."""
    medians = []
    for layers in (FEW, MANY):
        asked.layers = layers
        engine, _ = make_engine(asked, asked.tokens, mode, chip)
        given = batches(engine, asked.tokens, asked.micro_batches)
        seconds = []
        for _ in range(14):
            begin = time.perf_counter()
            engine.step(given.__getitem__, SETTINGS)
            seconds.append(time.perf_counter() - begin)
        medians.append(statistics.median(seconds[4:]))
        del engine
        gc.collect()
        chip.empty_cache()
    return 1e6 * (medians[1] - medians[0]) / (MANY - FEW) / asked.micro_batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, layers=8, vocabulary=4096, micro_batches=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--lines", type=int, default=45)
    parser.add_argument("--graphs", action="store_true")
    asked = parser.parse_args()
    chip = open_accelerator(asked.device)
    if asked.graphs:
        issued, captured = (block_us(asked, mode, chip) for mode in ("off", "on"))
        share = captured / issued
        print(f"a block: {issued:.0f} us kernel by kernel, {captured:.0f} as graphs: {share:.3f}")
        return
    engine, _ = make_engine(asked, asked.tokens, "off", chip)
    given = batches(engine, asked.tokens, asked.micro_batches)

    def step() -> float:
        chip.synchronize()
        begin = time.perf_counter()
        engine.step(given.__getitem__, SETTINGS)
        chip.synchronize()
        return time.perf_counter() - begin

    for _ in range(4):
        step()
    for collects in (True, False):
        if not collects:
            gc.collect()
            gc.freeze()
            gc.disable()
        taken = statistics.median(step() for _ in range(10))
        each = 1e6 * taken / asked.layers / asked.micro_batches
        print(f"{'with' if collects else 'without'} collector: {1e3 * taken:.1f} ms, {each:.0f} us")
    with cProfile.Profile() as profile:
        for _ in range(5):
            step()
    pstats.Stats(profile).sort_stats("tottime").print_stats(asked.lines)


if __name__ == "__main__":
    main()
