"""Trains a few layers on and on, as the neighbour of a part of a device that is measured.

Says so when its first step has ended; ends when its standard input does. `mixed_gpus.py` starts it:
python benchmarks/neighbour.py --model llama-3.2-1b.
"""

from __future__ import annotations

import argparse
import sys
import threading

from engine_graphs import SETTINGS, add_arguments, batches, make_engine

from tutti.accelerator import open_accelerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, layers=4, vocabulary=8192, micro_batches=8)
    parser.add_argument("--tokens", type=int, default=8192)
    asked = parser.parse_args()
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    accelerator = open_accelerator(asked.device)
    engine, _ = make_engine(asked, asked.tokens, "off", accelerator)
    given = batches(engine, asked.tokens, asked.micro_batches)
    said = False
    while not ended.is_set():
        engine.step(given.__getitem__, SETTINGS)
        if not said:
            print("busy", flush=True)
            said = True
    accelerator.synchronize()  # under MPS a client that ends amid its kernels breaks the others


if __name__ == "__main__":
    main()
