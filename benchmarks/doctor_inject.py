"""Logs of faults that are injected into runs of three gloo ranks: cases for `doctor_logs.py`.

    python benchmarks/doctor_inject.py [FAULT...] -o benchmarks/doctor_cases/injected.yaml

Every fault runs under torchrun or as three plain processes; what they print is the case, and the
fault says component and rank. Paths of this machine are cut out of the lines.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

RANKS = 3
SCRIPT = """
import ctypes, datetime, os, resource, signal, sys, time
import torch, torch.distributed as dist
rank = int(os.environ["RANK"]); out = os.environ["FAULT_DIR"]
dist.init_process_group(os.environ.get("BACKEND", "gloo"), timeout=datetime.timedelta(seconds=4))
x = torch.ones(1024)
dist.all_reduce(x)
FAULT
dist.all_reduce(x)
dist.barrier()
"""
# fault: (component, rank of the culprit or None, code, environment)
FAULTS: dict[str, tuple[str, int | None, str, dict[str, str]]] = {
    "list index": ("software", 1, "if rank == 1: [][3]", {}),
    "shapes": ("software", 2, "if rank == 2: torch.ones(2, 3) @ torch.ones(2, 3)", {}),
    "keyword": ("software", 0, "if rank == 0: torch.nn.Linear(2, 2, bais=True)", {}),
    "missing key": ("software", 1, "if rank == 1: {}['optimizer']", {}),
    "attribute": ("software", 2, "if rank == 2: None.shape", {}),
    "two backwards": (
        "software",
        1,
        "w = torch.ones(2, requires_grad=True)\nif rank == 1:\n    y = (w * w).sum(); y.backward(); y.backward()",  # noqa: E501
        {},
    ),
    "in place": (
        "software",
        0,
        "w = torch.ones(2, requires_grad=True)\nif rank == 0:\n    e = w.exp(); e.mul_(2); e.sum().backward()",  # noqa: E501
        {},
    ),
    "nan": (
        "software",
        2,
        "torch.autograd.set_detect_anomaly(True)\nw = torch.zeros(2, requires_grad=True)\nif rank == 2: (w.sqrt() * 0).sum().backward()",  # noqa: E501
        {},
    ),
    "native crash": ("software", 1, "if rank == 1: ctypes.string_at(0)", {}),
    "assertion": ("software", 2, "if rank == 2: assert x.sum() == 0, 'sums differ'", {}),
    "full device": ("storage", 2, "if rank == 2: torch.save(x, '/dev/full')", {}),
    "full disk": ("storage", 0, "if rank == 0: open('/dev/full', 'wb', buffering=0).write(b'x')", {}),  # noqa: E501
    "torn checkpoint": (
        "storage",
        1,
        "if rank == 1:\n    p = out + '/model.pt'; torch.save(x, p)\n    b = open(p, 'rb').read(); open(p, 'wb').write(b[: len(b) // 2]); torch.load(p)",  # noqa: E501
        {},
    ),
    "empty checkpoint": (
        "storage",
        2,
        "if rank == 2:\n    p = out + '/model.pt'; open(p, 'wb').close(); torch.load(p)",
        {},
    ),
    "no such checkpoint": ("configuration", 0, "if rank == 0: torch.load(out + '/iter_0000100/model.pt')", {}),  # noqa: E501
    "no such module": ("configuration", 1, "if rank == 1: import transformer_engine_torch", {}),
    "open files": (
        "configuration",
        1,
        "if rank == 1:\n    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n    kept = [open('/dev/null') for _ in range(99)]",  # noqa: E501
        {},
    ),
    "no CUDA": ("configuration", 0, "if rank == 0: x.cuda()", {}),
    "no memory": (
        "host",
        2,
        "if rank == 2:\n    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n    kept = bytearray(1 << 32)",  # noqa: E501
        {},
    ),
    "no memory for a tensor": ("host", 1, "if rank == 1: torch.empty(1 << 50)", {}),
    "late rank": ("undetermined", 1, "if rank == 1: time.sleep(12)", {}),
    "skipped collective": ("undetermined", 2, "if rank != 2: dist.all_reduce(x)\nelse: time.sleep(12)", {}),  # noqa: E501
    "silent end": ("undetermined", 1, "if rank == 1: os._exit(3)", {}),
    "stopped": ("undetermined", None, "if rank == 2: os.kill(os.getpid(), signal.SIGSTOP)", {}),
    "no NCCL": ("configuration", None, "", {"BACKEND": "nccl"}),
    "no such backend": ("configuration", None, "", {"BACKEND": "ucc"}),
    "unknown host": ("configuration", None, "", {"MASTER_ADDR": "head-node.invalid"}),
    "port taken": ("configuration", None, "", {"PORT_TAKEN": "1"}),
}  # fmt: skip
UNDER_TORCHRUN: dict[str, tuple[str, int | None, str, dict[str, str]]] = {
    "torchrun: list index": ("software", 2, "if rank == 2: [][3]", {}),
    "torchrun: shapes": ("software", 0, "if rank == 0: x.view(3, 5)", {}),
    "torchrun: full disk": ("storage", 1, "if rank == 1: torch.save(x, '/dev/full')", {}),
    "torchrun: killed": ("host", 1, "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)", {}),
    "torchrun: native crash": ("software", 2, "if rank == 2: ctypes.string_at(0)", {}),
    "torchrun: no memory": ("host", 0, "if rank == 0: torch.empty(1 << 50)", {}),
    "torchrun: no such file": ("configuration", 1, "if rank == 1: open(out + '/train.bin')", {}),
    "torchrun: silent end": ("undetermined", 2, "if rank == 2: os._exit(3)", {}),
    "torchrun: late rank": ("undetermined", 1, "if rank == 1: time.sleep(12)", {}),
}  # fmt: skip
FAULTS |= UNDER_TORCHRUN
_FRAMES = re.compile(r"frame #|^(?:\[rank\d\]:)?\s{3,}\S|^\s+File |^[=-]{9,}")
_HERE = re.compile(r"/[\w./+-]*?/(?=site-packages|dist-packages|script\.py)")


def free_port() -> int:
    """Return a port that nobody has."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def injected(name: str, folder: Path) -> str:
    """Run three ranks with a fault, and return what they print, rank by rank."""
    _, _, code, extra = FAULTS[name]
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("FAULT\n", code + "\n"))
    if name in UNDER_TORCHRUN:
        return _cleaned(_by_torchrun(script, folder), folder)
    port = free_port()
    taken = socket.socket()
    if extra.get("PORT_TAKEN"):
        taken.bind(("0.0.0.0", port))
        taken.listen()
    common = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "FAULT_DIR": str(folder), "WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **extra,
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)], env={**common, "RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    parts = []
    for rank, process in enumerate(ranks):
        try:
            text, _ = process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
        ended = process.returncode
        text += f"[launcher] rank {rank} ended with signal {signal.Signals(-ended).name}\n" if (
            ended < 0 and name != "stopped"
        ) else ""  # fmt: skip
        parts.append(text)
    taken.close()
    return _cleaned("".join(parts), folder)


def _by_torchrun(script: Path, folder: Path) -> str:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={RANKS}", str(script),
    ]  # fmt: skip
    environment = {**os.environ, "FAULT_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, env=environment, text=True, timeout=90, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder,
    )  # fmt: skip
    return ended.stdout


def _cleaned(text: str, folder: Path) -> str:
    """Return lines without this machine's paths and name."""
    text = text.replace(sys.executable, "python").replace(str(folder), "/job")
    text = _HERE.sub("", text)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "worker-17", text)


def shortened(text: str) -> str:
    """Return the lines that are not frames of a trace."""
    kept = [
        line.rstrip() for line in text.splitlines()
        if line.strip() and not _FRAMES.search(line)
    ]  # fmt: skip
    return "\n".join(kept[:60]) + "\n"


def written(case: dict[str, object]) -> str:
    """Return a case as YAML that a person reads."""
    head = {key: value for key, value in case.items() if key != "log"}
    text = "".join(f"    {line}\n" for line in str(case["log"]).splitlines())
    first, *rest = yaml.safe_dump(head, sort_keys=False, width=10_000).splitlines()
    return "\n".join([f"- {first}", *(f"  {line}" for line in rest), "  log: |2", text])


def main() -> None:
    """Inject the faults, and write the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("fault", nargs="*", default=[])
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    cases = yaml.safe_load(arguments.output.read_text()) if arguments.output.exists() else []
    have = {case["source"] for case in cases}
    for name in arguments.fault or FAULTS:
        source = f"injected: {name}"
        if source in have:
            continue
        component, rank, code, extra = FAULTS[name]
        with tempfile.TemporaryDirectory() as folder:
            log = shortened(injected(name, Path(folder)))
        case = {
            "source": source,
            "component": component,
            "why": (code or str(extra)).strip(),
            "log": log,
        }
        cases.append(case if rank is None else {**case, "rank": rank})
        arguments.output.write_text("".join(written(one) for one in cases))
        print(name, len(log.splitlines()), "lines")


if __name__ == "__main__":
    main()
