"""Flight recorders' dumps of faults that are injected into gloo ranks: does the doctor name them?

    python benchmarks/doctor_dumps.py [FAULT…] [--trace]

Every fault runs in four processes with PyTorch's flight recorder on; after some seconds in which
nothing can move any more each rank that lives writes its dump, in pickle and in JSON in turn. Right
is exactly the culprit and no healthy rank, or nobody where nothing is wrong. `--trace` prints what
PyTorch's own torchfrtrace says of the same records.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from tutti.diagnose.dumps.records import read_dumps
from tutti.diagnose.dumps.verdict import diagnose_dumps

RANKS = 4
STILL_S = 3.0
PAIRS = ([0, 1], [2, 3], [0, 2], [1, 3])
_CODE = """
import os, time
import torch, torch.distributed as dist
x, y = torch.ones(64), torch.ones(64)
subs = [dist.new_group(pair) for pair in pairs]
pair, cross = (subs[0] if rank < 2 else subs[1]), (subs[2] if rank % 2 == 0 else subs[3])
for _ in range(3):
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.all_reduce(x, group=pair)
"""
_HANG = "time.sleep(600)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong, and who is to blame."""

    code: str
    ranks: tuple[int, ...]
    dies: int | None = None  # leaves no dump


FAULTS: dict[str, Fault] = {
    "never comes to a sum": Fault(
        code=f"if rank == 2: {_HANG}\ndist.all_reduce(x)", ranks=(2,)),
    "never comes to a broadcast, as its source": Fault(
        code=f"if rank == 0: {_HANG}\ndist.broadcast(x, 0)\ndist.all_reduce(x)", ranks=(0,)),
    "never comes to a barrier": Fault(
        code=f"if rank == 3: {_HANG}\ndist.barrier()", ranks=(3,)),
    "never comes to a gather": Fault(
        code="o = [torch.empty(64) for _ in range(4)]\n"
        f"if rank == 1: {_HANG}\ndist.all_gather(o, x)", ranks=(1,)),
    "skips a sum and waits in the next collective": Fault(
        code="if rank != 1: dist.all_reduce(x)\ndist.broadcast(y, 0)\ndist.barrier()", ranks=(1,)),
    "calls another operation": Fault(
        code="dist.all_reduce(x) if rank != 2 else dist.broadcast(x, 2)\ndist.barrier()",
        ranks=(2,)),
    "stops two collectives earlier": Fault(
        code=f"if rank == 1: {_HANG}\ndist.all_reduce(x)\ndist.all_reduce(y)", ranks=(1,)),
    "late in its pair, for whom the others wait in turn": Fault(
        code=f"if rank == 3: {_HANG}\ndist.all_reduce(x, group=pair)\ndist.all_reduce(x)",
        ranks=(3,)),
    "late across, three groups away": Fault(
        code=f"if rank == 0: {_HANG}\ndist.all_reduce(x, group=cross)\n"
        "dist.all_reduce(x, group=pair)\ndist.all_reduce(x)", ranks=(0,)),
    "receives what nobody sends": Fault(
        code=f"if rank == 0: dist.recv(x, 1)\nelif rank == 1: {_HANG}\ndist.all_reduce(y)",
        ranks=(1,)),
    "a pipeline whose second stage stops": Fault(
        code=f"if rank == 1: dist.recv(x, 0); {_HANG}\n"
        "if rank > 0: dist.recv(x, rank - 1)\nif rank < 3: dist.send(x, rank + 1)\n"
        "dist.barrier()", ranks=(1,)),
    "is killed": Fault(
        code="if rank == 2: os.kill(os.getpid(), 9)\ndist.all_reduce(x)", ranks=(2,), dies=2),
    "is stopped": Fault(
        code="if rank == 1: os.kill(os.getpid(), 19)\ndist.all_reduce(x)", ranks=(1,), dies=1),
    "leaves by itself": Fault(
        code="if rank == 0: os._exit(3)\ndist.barrier()", ranks=(0,), dies=0),
    "nothing is wrong": Fault(code="dist.barrier()", ranks=()),
}  # fmt: skip


def be_rank(rank: int, code: str, folder: str, form: str) -> None:
    """Be a rank of a run with a fault, and write its dump."""
    os.environ |= {
        "TORCH_FR_BUFFER_SIZE": "200", "TORCH_NCCL_TRACE_BUFFER_SIZE": "200",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    from torch import distributed
    from torch._C import _distributed_c10d as recorder

    store = distributed.FileStore(f"{folder}/store", RANKS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)

    def dump() -> None:
        time.sleep(STILL_S)
        data = recorder._dump_fr_trace() if form == "pickle" else recorder._dump_fr_trace_json()
        Path(f"{folder}/dumps/rank_{rank}").write_bytes(
            data if isinstance(data, bytes) else data.encode()
        )

    threading.Thread(target=dump).start()
    try:
        exec(_CODE + code, {"rank": rank, "pairs": PAIRS})
    except RuntimeError:
        time.sleep(600)  # a rank that lost the others still has its dump to write
    time.sleep(600)


def injected(fault: Fault, folder: Path, form: str) -> None:
    """Run the ranks until all that can have written their dumps."""
    (folder / "dumps").mkdir()
    context = get_context("fork")
    ranks = [
        context.Process(target=be_rank, args=(rank, fault.code, str(folder), form))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    wanted = RANKS - (fault.dies is not None)
    until = time.monotonic() + 90
    while len(list((folder / "dumps").iterdir())) < wanted and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(0.3)
    for process in ranks:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()


def traced(folder: Path) -> tuple[set[int], str]:
    """Return whom PyTorch's own analyser calls missing, and the last thing that it says.

    It reads pickles alone, and not those of gloo, which do not say who is of a group: it gets the
    same records as pickles, with the members of all groups.
    """
    members = {"0": list(range(RANKS))} | {str(n): pair for n, pair in enumerate(PAIRS, start=1)}
    config = {name: {"name": name, "desc": "", "ranks": str(r)} for name, r in members.items()}
    for path in folder.iterdir():
        data = path.read_bytes()
        value = json.loads(data) if data[:1] == b"{" else pickle.loads(data)
        path.write_bytes(pickle.dumps(value | {"pg_config": config}))
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder),
               "-p", "rank_"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    text = done.stdout + done.stderr
    missing = re.findall(r"missing ranks: {([\d, ]+)}", text)
    lines = [line for line in text.splitlines() if line.strip()]
    return {int(r) for ranks in missing for r in ranks.split(",")}, lines[-1] if lines else ""


def main() -> None:
    """Inject the faults, and print what was named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("fault", nargs="*")
    parser.add_argument("--trace", action="store_true")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    good = healthy_named = traced_good = traced_healthy = 0
    chosen = {name: FAULTS[name] for name in args.fault or FAULTS}
    for number, (name, fault) in enumerate(chosen.items()):
        form = ("pickle", "json")[number % 2]
        with tempfile.TemporaryDirectory() as temporary:
            injected(fault, Path(temporary), form)
            found = diagnose_dumps(*read_dumps(Path(temporary) / "dumps"))
            beside = traced(Path(temporary) / "dumps") if args.trace else None
        fits = tuple(found.where.ranks) == fault.ranks
        good += fits
        healthy_named += bool(set(found.where.ranks) - set(fault.ranks))
        ranks = ", ".join(map(str, found.where.ranks)) or "nobody"
        word = "right" if fits else "WRONG"
        print(f"{word}  {name} ({form}): {ranks}; {found.cause}", flush=True)
        if beside is not None:
            traced_good += beside[0] == set(fault.ranks)
            traced_healthy += bool(beside[0] - set(fault.ranks))
            named = ", ".join(map(str, sorted(beside[0]))) or f"nobody ({beside[1][:120]})"
            print(f"       torchfrtrace: {named}", flush=True)
    print(f"{good} of {len(chosen)} right; a healthy rank named in {healthy_named}")
    if args.trace:
        print(f"torchfrtrace: {traced_good} right; a healthy rank named in {traced_healthy}")


if __name__ == "__main__":
    main()
