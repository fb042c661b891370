"""What becomes of processes that share a GPU by MPS when one of them is killed.

    python -m benchmarks.mps_deaths              # on a machine with one NVIDIA GPU
    python -m benchmarks.mps_deaths copies returned

Three processes of 50, 25 and 25 % do the same work; the third is ended by SIGKILL in the midst of
it. The others are asked four seconds later whether they still compute. Work is products alone, the
same with copies to pinned memory of the process, or with copies to pinned memory that all three
have mapped, as ranks of one host have. With "returned" the others then take the mapped memory back
from the driver (`--after` so many seconds), while they copy to memory of their own, as ranks do
whose neighbour is gone; with "alive" they do so and nobody is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.mixed_gpus import limits, shared_device

PARTS = (50, 25, 25)
WORK = ("products", "copies", "shared", "returned", "alive")
AFTER_S = 4.0  # from the kill to the question
BYTES = 32 << 20
OWN_BYTES = 2 << 30  # copied to the process's own memory without a pause, where memory is returned


def compute(work: str, path: str, after_s: float) -> None:
    """Compute until asked to end; say at once when the device no longer does."""
    import torch

    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    given = torch.randn(BYTES // 4, device="cuda")
    lane = torch.cuda.Stream()
    host = own = None
    told = Path(path + ".over")
    if work == "copies":
        host = torch.empty(BYTES // 4, pin_memory=True)
    elif work != "products":
        host = torch.from_file(path, shared=True, size=BYTES // 4)
        if int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)):
            raise RuntimeError("the mapped memory cannot be pinned")
    if work in ("returned", "alive"):
        state = torch.randn(OWN_BYTES // 4, device="cuda")
        own, other = torch.empty(OWN_BYTES // 4, pin_memory=True), torch.cuda.Stream()
    print("ready", flush=True)
    turns, until = 0, math.inf
    while True:
        for _ in range(20):
            a = (a @ a).clamp_(-1, 1)
            if own is not None:
                with torch.cuda.stream(other):
                    own.copy_(state, non_blocking=True)
            if host is not None:
                with torch.cuda.stream(lane):
                    host.copy_(given, non_blocking=True)
                    given.copy_(host, non_blocking=True)
            if until == math.inf and told.exists():
                until = time.monotonic() + after_s
            if own is not None and host is not None and time.monotonic() >= until:
                lane.synchronize()
                torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
                host = None
        torch.cuda.synchronize()
        turns += 1
        print(turns, flush=True)


def trial(work: str, scratch: Path, after_s: float) -> list[str]:
    """Kill one of three; return what the others say."""
    memory = Path("/dev/shm") / f"mps-deaths-{os.getpid()}"
    memory.write_bytes(bytes(BYTES))
    logs = [scratch / f"client-{number}" for number in range(len(PARTS))]
    clients = []
    with contextlib.ExitStack() as stack:
        stack.callback(memory.unlink)
        for part, log in zip(PARTS, logs, strict=True):
            command = [sys.executable, "-m", "benchmarks.mps_deaths", "--client", work, str(memory)]
            clients.append(
                subprocess.Popen(
                    [*command, "--after", str(after_s)],
                    stdout=stack.enter_context(log.open("w")),
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **limits(part)},
                )
            )
            stack.callback(end, clients[-1])
        until = time.monotonic() + 60
        while not all("\n5\n" in log.read_text() for log in logs):
            if time.monotonic() > until or any(c.poll() is not None for c in clients):
                return [f"never ran: {log.read_text().splitlines()[-1:]}" for log in logs]
            time.sleep(0.1)
        if work != "alive":
            clients[-1].send_signal(signal.SIGKILL)
        over = Path(f"{memory}.over")
        over.touch()
        stack.callback(over.unlink)
        if work != "alive":
            clients[-1].wait()
        before = [log.read_text().count("\n") for log in logs[:-1]]
        time.sleep(AFTER_S)
        said = []
        for client, log, turns in zip(clients, logs, before, strict=False):
            lines = log.read_text().splitlines()
            if client.poll() is not None:
                said.append(f"ended ({client.returncode}): {lines[-1]}")
            else:
                more = len(lines) - turns
                said.append(f"goes on, {more} turns" if more > 1 else "hangs")
        return said


def end(client: subprocess.Popen[bytes]) -> None:
    """End a client."""
    client.kill()
    client.wait()


def main() -> None:
    """Try each work some times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", nargs="*", default=list(WORK))
    parser.add_argument("--client", nargs=2)
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--after", type=float, default=0.0, help="from the kill to giving back")
    given = parser.parse_args()
    if given.client:
        compute(*given.client, given.after)
    with tempfile.TemporaryDirectory() as temporary:
        for work in given.work:
            for number in range(given.trials):
                scratch = Path(temporary) / f"{work}-{number}"
                scratch.mkdir()
                with shared_device(scratch):  # of its own: what one trial broke is not the next's
                    print(f"{work}: {trial(work, scratch, given.after)}", flush=True)


if __name__ == "__main__":
    main()
