"""What a server costs beside its engine: streamed tokens a second with an engine that is none.

python benchmarks/server_cost.py --streams 256 --tokens 200 --apis 1 [--profile]

The engine's process gives every request a token each `--step-ms`; the API processes and the load's
client are the real ones. CPU seconds a token are theirs alone.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import zmq

from tutti.bench.serving_load import load
from tutti.bench.traces import Asked
from tutti.server import messages
from tutti.server.messages import (
    Cancel,
    EngineState,
    ServerConfig,
    ServerFolder,
    State,
    Submit,
    Update,
)
from tutti.server.sockets import ServerSockets, SocketName

PROFILED = """
import cProfile, pstats, sys
from pathlib import Path
from tutti.server import api_process
profile = cProfile.Profile()
try:
    profile.runcall(api_process.main, Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
finally:
    pstats.Stats(profile).sort_stats("tottime").print_stats(28)
"""


def engine(folder: Path, step_s: float) -> None:
    """Answer requests: a letter each, every step."""
    own = ServerFolder(folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.SNDHWM, 0)
    address = ServerSockets(own).bind(router, SocketName("engine", 0, 1))
    own.write("adapters.json", {})
    own.write(
        "state.json",
        State(
            engines=(
                EngineState(
                    generation=1, address=address, ready=True, context=4096, vocab=256, slots=1024
                ),
            )
        ),
    )  # fmt: skip
    left: dict[tuple[bytes, int], int] = {}
    due = time.perf_counter()
    while True:
        while router.poll(0 if left else 100):
            client, data = router.recv_multipart()
            said = messages.for_engine(data)
            if isinstance(said, Submit):
                left[client, said.id] = said.wishes.max_tokens
            elif isinstance(said, Cancel):
                left.pop((client, said.id), None)
        answers: dict[bytes, list[messages.FromEngine]] = {}
        for (client, number), count in list(left.items()):
            finish = "length" if count == 1 else None
            said_now = Update(id=number, tokens=[65 + count % 26], finish=finish)
            answers.setdefault(client, []).append(said_now)
            left[client, number] = count - 1
            if finish:
                del left[client, number]
        for client, said_all in answers.items():
            router.send_multipart([client, messages.encode(said_all)])
        due = max(due + step_s, time.perf_counter())
        time.sleep(max(0.0, due - time.perf_counter()))


def main() -> None:
    """Start it, load it, print what it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--apis", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = ServerConfig(folder=name, name="m", engine={"tokenizer": "bytes"}, apis=given.apis)
        (folder / "config.json").write_bytes(msgspec.json.encode(config))
        listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
        port = listening.getsockname()[1]
        stub = multiprocessing.get_context("spawn").Process(
            target=engine, args=(folder, given.step_ms / 1e3), daemon=True
        )
        stub.start()
        fd = listening.fileno()
        begin = ["-c", PROFILED] if given.profile else ["-m", "tutti.server.api_process"]
        apis = [
            subprocess.Popen([sys.executable, *begin, name, str(fd), f"api{n}"], pass_fds=(fd,))
            for n in range(given.apis)
        ]
        try:
            run(f"http://127.0.0.1:{port}", given.streams, given.tokens, apis)
        finally:
            for api in apis:
                api.send_signal(signal.SIGTERM)
                api.wait()
            stub.kill()


def run(url: str, streams: int, tokens: int, apis: list[subprocess.Popen[bytes]]) -> None:
    """Load the server twice, and print the second time."""
    asked = [Asked(prompt=tuple([66] * 16), new=tokens) for _ in range(streams)]
    for turn in range(3):
        while not turn:
            try:
                asyncio.run(load(url, "m", asked[:1], [0.0]))
                break
            except OSError:
                time.sleep(0.2)
        before, own = [cpu(api.pid) for api in apis], resource.getrusage(resource.RUSAGE_SELF)
        found = asyncio.run(load(url, "m", asked, [0.0] * streams))
        after, now = [cpu(api.pid) for api in apis], resource.getrusage(resource.RUSAGE_SELF)
        spent = sum(after) - sum(before)
        client = now.ru_utime + now.ru_stime - own.ru_utime - own.ru_stime
        count = found.output_tokens
        print(
            f"{streams} streams: {found.output_rate:.0f} tokens/s ({found.failed} failed "
            f"{found.first_error}), first p99 {found.first_s['p99']:.2f} s, gap p99 "
            f"{found.gap_s['p99'] * 1e3:.0f} ms; CPU µs a token: API {1e6 * spent / count:.0f}, "
            f"client {1e6 * client / count:.0f}",
            flush=True,
        )


def cpu(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
