"""The same faults under torchrun: a plain torch loop that saves after every step, for comparison.

    python benchmarks/elastic_torchrun.py [--ranks 4] [--kills 20]             # kills in a row
    python benchmarks/elastic_torchrun.py --minutes 10 --every 60              # effective time

torchrun restarts all workers when one ends. With gloo that works only with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which is set here. The loop is as small as can be: one linear
layer, gloo, gradients summed up, rank 0 writes a checkpoint after every step (rename), each step
takes `--step-s`. So nothing but torchrun and the imports of torch is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKER = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist

folder, steps, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
step, saved = 0, folder / "checkpoint.pt"
if saved.exists():
    found = torch.load(saved)
    step = found["step"]
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
dist.barrier()
(folder / f"pid-{rank}").write_text(str(os.getpid()))
while step < steps:
    began = time.monotonic()
    model(torch.randn(8, 64)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(max(0.0, step_s - (time.monotonic() - began)))
    step += 1
    if rank == 0:
        fresh = folder / "fresh.pt"
        torch.save({"step": step, "model": model.state_dict(),
                    "optimizer": optimizer.state_dict()}, fresh)
        fresh.rename(saved)
        with open(folder / "steps", "a") as file:
            file.write(f"{step} {time.time()}\\n")
    dist.barrier()
dist.destroy_process_group()
"""


class Run:
    """A job under torchrun."""

    def __init__(self, folder: Path, ranks: int, step_s: float) -> None:
        self.folder, self.ranks, self.step_s = folder, ranks, step_s
        (folder / "worker.py").write_text(WORKER, encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1",
             f"--nproc-per-node={ranks}", "--max-restarts=1000", str(folder / "worker.py"),
             str(folder), "1000000", str(step_s)],
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def steps(self) -> list[tuple[int, float]]:
        """Return the steps that were made, and when each ended."""
        path = self.folder / "steps"
        lines = path.read_text(encoding="ascii").splitlines() if path.is_file() else []
        return [(int(a), float(b)) for a, b in (line.split() for line in lines)]

    def until(self, count: int, limit_s: float) -> bool:
        """Wait for so many steps; False: they did not come."""
        end = time.monotonic() + limit_s
        while len(self.steps()) < count:
            if time.monotonic() > end or self.process.poll() is not None:
                return False
            time.sleep(0.01)
        return True

    def kill(self, rank: int, how: signal.Signals = signal.SIGKILL) -> float:
        """Kill a rank, or stop it; return when."""
        at = time.time()
        os.kill(int((self.folder / f"pid-{rank}").read_text(encoding="ascii")), how)
        return at

    def close(self) -> None:
        """End all of it: its workers have sessions of their own."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for rank in range(self.ranks):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                self.kill(rank)


def kills(run: Run, count: int, limit_s: float) -> None:
    """Kill ranks in turn, and print how long going on took."""
    gaps = []
    if not run.until(3, limit_s):
        raise SystemExit("torchrun does not start")
    for number in range(count):
        before = len(run.steps())
        at = run.kill(number % run.ranks)
        if not run.until(before + 2, limit_s):  # one may have been under way
            break
        gaps.append(next(t for _, t in run.steps() if t > at + 2 * run.step_s) - at)
        run.until(len(run.steps()) + 2, limit_s)
    print(
        f"torchrun: {len(gaps)} of {count} kills recovered; kill to the end of the next step "
        f"{statistics.median(gaps):.2f} s (median; {min(gaps):.2f} to {max(gaps):.2f})"
    )


def effective(run: Run, given: argparse.Namespace) -> None:
    """Kill random ranks now and then, and print the share of time in steps that were kept.

    With `given.hangs`, that share of them is stopped, which only gloo's time-out notices.
    """
    if not run.until(3, 120):
        raise SystemExit("torchrun does not start")
    chance = random.Random(given.seed)
    began, deaths, hangs = time.time(), 0, 0
    first = run.steps()[-1][0]
    due = began + chance.expovariate(1 / given.every)
    while time.time() < began + 60 * given.minutes:
        time.sleep(0.05)
        if time.time() >= due:
            due = time.time() + chance.expovariate(1 / given.every)
            try:
                rank, hang = chance.randrange(run.ranks), chance.random() < given.hangs
                run.kill(rank, signal.SIGSTOP if hang else signal.SIGKILL)
                deaths, hangs = deaths + (not hang), hangs + hang
            except ProcessLookupError:
                pass  # all are being started again
    wall = time.time() - began
    kept = run.steps()[-1][0] - first
    print(
        f"torchrun: {deaths} deaths, {hangs} hangs in {wall:.0f} s; {kept} steps kept of "
        f"{run.step_s:.3f} s: {kept * run.step_s / wall:.1%} of the time",
        flush=True,
    )


def main() -> None:
    """Run, and print the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=0.2)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--every", type=float, default=60.0)
    parser.add_argument("--hangs", type=float, default=0.0, help="share of deaths that are hangs")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = Run(Path(temporary), given.ranks, given.step_s)
        try:
            if given.minutes:
                effective(run, given)
            else:
                kills(run, given.kills, 120.0)
        finally:
            run.close()


if __name__ == "__main__":
    main()
