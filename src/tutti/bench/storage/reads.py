"""Ranged reads from a server of limited rate: by one connection, and by several."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tutti.bench.storage.slow_server import SlowServer
from tutti.storage.ranged import STREAMS, fetch, read_into, require_file
from tutti.storage.url import RemoteFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRate:
    """What a way of reading reached."""

    way: str
    bytes_per_second: float
    share: float  # of the server's rate


def measure_reads(folder: Path, rate: float, num_bytes: int) -> list[ReadRate]:
    """Read a file of a server that sends at most `rate`, in three ways; all bytes are compared."""
    store = folder / "store"
    store.mkdir()
    content = os.urandom(num_bytes)
    (store / "large.bin").write_bytes(content)
    rates = []
    with SlowServer(store, rate) as server:
        remote = RemoteFolder(server.url)
        for streams in (1, STREAMS):
            memory = bytearray(num_bytes)
            with ThreadPoolExecutor(streams) as pool:
                began = time.perf_counter()
                read_into(remote, "large.bin", 0, memoryview(memory), pool)
                seconds = time.perf_counter() - began
            assert memory == content
            way = "one connection" if streams == 1 else f"{streams} connections"
            rates.append(_rate(f"ranges into memory, {way}", num_bytes / seconds, rate))
        began = time.perf_counter()
        fetch(remote, require_file(remote, "large.bin"), folder / "large.bin")
        seconds = time.perf_counter() - began
        assert (folder / "large.bin").read_bytes() == content
        rates.append(_rate("fetched to a disk, checksummed", num_bytes / seconds, rate))
    return rates


def _rate(way: str, reached: float, rate: float) -> ReadRate:
    return ReadRate(way=way, bytes_per_second=reached, share=reached / rate)
