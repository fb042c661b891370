"""An etcd of one member, for tests; skipped where there is none."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.elastic_hosts import free_port
from tutti.elastic.etcd import Etcd, StoreAwayError


@dataclass
class EtcdServer:
    """A server that tests start, stop and end."""

    folder: Path
    host: str = "127.0.0.1"
    port: int = field(default_factory=free_port)
    quota_bytes: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        program = shutil.which("etcd")
        if program is None:
            pytest.skip("etcd is not installed (Debian: apt-get install etcd-server)")
        here, peer = f"http://{self.host}:{self.port}", f"http://{self.host}:{free_port()}"
        with (self.folder / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(
                [program, "--data-dir", str(self.folder / "etcd"), "--log-level", "error",
                 "--listen-client-urls", here, "--advertise-client-urls", here,
                 "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                 "--initial-cluster", f"default={peer}", "--unsafe-no-fsync",
                 *([f"--quota-backend-bytes={self.quota_bytes}"] if self.quota_bytes else [])],
                stdout=log, stderr=log,
                env={**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"},
            )  # fmt: skip
        client, until = Etcd([(self.host, self.port)]), time.monotonic() + 20
        while True:
            try:
                client.put("started", "yes")
                return
            except StoreAwayError:
                assert time.monotonic() < until, "etcd does not start"
                time.sleep(0.05)

    def url(self, name: str) -> str:
        return f"etcd://{self.host}:{self.port}/{name}"

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
