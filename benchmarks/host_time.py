"""What the host needs to issue a training step, and where that goes.

    python benchmarks/host_time.py            # on a machine with a GPU, about 20 s

So few tokens that the chip waits for the host: a step then takes what its Python takes. Prints
microseconds per block and micro-batch, with and without the garbage collector, and the functions
that have the most of it.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time

from engine_graphs import SETTINGS, add_arguments, batches, make_engine

from tutti.accelerator import open_accelerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, layers=8, vocabulary=4096, micro_batches=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--lines", type=int, default=45)
    asked = parser.parse_args()
    chip = open_accelerator(asked.device)
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
