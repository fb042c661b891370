"""Does the doctor find a part of one GPU that was cut under MPS from 50 to 33 % of its processors?

    PYTHONPATH=src python benchmarks/doctor_gpu.py -o out.json   # on a machine with one NVIDIA GPU
    PYTHONPATH=src python benchmarks/doctor_gpu.py --rehearse    # the same script on emulated chips

Every trial reads four parts of the device, each a process of its own, as `tutti doctor` reads
chips, one after the other: its products are compared with float32 first, then timed. Three parts
have 50 %, one 33 %; which one changes from trial to trial. As many trials without a cut must raise
no alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tutti.accelerator.accelerator import Accelerator
    from tutti.diagnose.cluster.chips import ChipReading

PARTS = 4
WHOLE, CUT = 50, 33  # per cent of the processors
REPEATS = 7


@contextlib.contextmanager
def shared_device(scratch: Path) -> Iterator[None]:
    """Run NVIDIA's multi-process service while the block runs."""
    places = {
        "CUDA_MPS_PIPE_DIRECTORY": str(scratch / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(scratch / "log"),
    }
    for folder in places.values():
        Path(folder).mkdir()
    os.environ.update(places)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False)


def be_part(*, per_cent: int, rehearse: bool) -> None:
    """Be a part of the device: open it, and once told to, say what it reads."""
    from tutti.diagnose.active.chips import read_chip
    from tutti.diagnose.active.rehearsal import TimedChip

    if rehearse:
        part: Accelerator = TimedChip("part", 0.01 * WHOLE / per_cent)
    else:
        from tutti.accelerator.find import open_accelerator

        part = open_accelerator("cuda")
        part.memory()  # its context is made now, not when it is timed
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(asdict(read_chip(part, repeats=3 if rehearse else REPEATS))), flush=True)


def started(per_cent: int, args: argparse.Namespace) -> subprocess.Popen[str]:
    """Start a process that has so many of the processors."""
    command = [sys.executable, __file__, "--part", str(per_cent)]
    return subprocess.Popen(
        command + ["--rehearse"] * args.rehearse, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(per_cent)},
    )  # fmt: skip


def reading(number: int, part: subprocess.Popen[str]) -> ChipReading:
    """Return what a part reads now, while the others wait."""
    from tutti.diagnose.cluster.chips import ChipReading

    answer, said = part.communicate("now\n", timeout=240)
    if part.returncode:
        raise SystemExit(f"part {number} failed:\n{said[-2000:]}")
    return ChipReading(**json.loads(answer.splitlines()[-1]) | {"name": f"part {number}"})


def trial(cut: int | None, args: argparse.Namespace) -> dict[str, object]:
    """Read all parts, one of them cut, and ask the doctor."""
    from tutti.diagnose.cluster.answer import check_finding

    parts = [started(CUT if n == cut else WHOLE, args) for n in range(PARTS)]
    for part in parts:
        assert part.stdout is not None
        part.stdout.readline()
    readings = [reading(n, part) for n, part in enumerate(parts)]
    found = check_finding(readings, None, [])
    named = sorted({*found.where.devices, *found.where.hosts})
    right = found.healthy if cut is None else any(f"part {cut}" in one for one in named)
    right = right and len(named) == (0 if cut is None else 1)
    seconds = [own.seconds["products"] for own in readings]
    wrong = [own.wrong for own in readings if own.wrong]
    return {
        "cut": cut, "right": right, "cause": found.cause, "named": named, "wrong_products": wrong,
        "milliseconds": [round(1e3 * one, 3) for one in seconds],
    }  # fmt: skip


def main() -> None:
    """Run the trials, or be one part of one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.part is not None:
        be_part(per_cent=args.part, rehearse=args.rehearse)
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        device = contextlib.nullcontext() if args.rehearse else shared_device(Path(scratch))
        with device:
            cuts = [None if n % 2 else n // 2 % PARTS for n in range(2 * args.trials)]
            trials = []
            for cut in cuts:
                trials.append(trial(cut, args))
                print(json.dumps(trials[-1]), flush=True)
    of_cuts = [one for one in trials if one["cut"] is not None]
    healthy = [one for one in trials if one["cut"] is None]
    found, quiet = (sum(bool(t["right"]) for t in some) for some in (of_cuts, healthy))
    print(
        f"cut from {WHOLE} to {CUT} %: found {found}/{len(of_cuts)}"
        f"; no alarm {quiet}/{len(healthy)}"
        f"; wrong products {sum(bool(t['wrong_products']) for t in trials)}"
        f"; {time.monotonic() - began:.0f} s"
    )
    if args.output is not None:
        args.output.write_text(json.dumps(trials, indent=1))


if __name__ == "__main__":
    main()
