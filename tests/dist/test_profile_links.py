"""`tutti profile` under torchrun: links between ranks are measured, one rank writes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from tutti.hardware.profile import Profile

SCRIPT = """
import sys
from tutti.accelerator.profiling import grid, links, session, workspace
from tutti.accelerator.profiling.cases import ProfileCase
links.PEER_BYTES = links.HOST_LARGE_BYTES = 1 << 16
grid.default_cases = lambda: [ProfileCase("add", (64,))]
session.FIRST_SIDE = session.LAST_SIDE = 64
session.MOST_VISITS = 1
workspace.HOST_ELEMENTS = 1 << 16
from tutti.cli.main import run
run(sys.argv[1:])
"""


def test_ranks_measure_their_links_and_one_writes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path, count = tmp_path / "p.json", 3
    arguments = ["profile", "-o", str(path), "--device", "cpu", "--budget", "10min"]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *arguments],
            env=os.environ
            | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
                "GROUP_RANK": str(rank // 2), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    said = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * count, said
    assert ["written to" in out for out, _ in said] == [True, False, False]
    found = Profile.load(path)
    assert [link.kind for link in found.links] == ["peer", "peer_node", "memory"]
    assert all(link.bandwidth > 0 and link.latency_s > 0 for link in found.links)
