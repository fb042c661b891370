"""Hosts' figures as Prometheus fetches them."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from tutti.observe import prometheus_hosts
from tutti.observe.figures import FIGURES, key
from tutti.observe.folder import CHECKPOINTS, SERIES
from tutti.observe.prometheus import Prometheus
from tutti.observe.store import SeriesStore

client = pytest.importorskip("prometheus_client", reason="needs tutti-ml[observe]")
PROMTOOL = shutil.which("promtool")


def fetched(folder: Path) -> tuple[Prometheus, int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    return Prometheus(port, folder=folder), port


def text_of(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / SERIES).mkdir()
    (tmp_path / SERIES / "broken-0.sqlite").write_text("no store")
    return tmp_path


def test_gauges_are_the_newest_and_counters_sums(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_hosts, "_KEPT_S", 0.0)
    server, port = fetched(folder)
    try:
        now = int(time.time())
        store = SeriesStore(folder / SERIES / "big-pool-3.sqlite")
        sent, heat = key("nic_sent_bytes_total", 'a"b'), key("chip_temperature_celsius", "0")
        for second in range(now - 100, now + 1):
            store.append("node", second, {sent: 10.0, heat: 50.0 + second - now})
        store.append("node", now + 1, {sent: 7.0})
        store.flush()
        for place in ("slow", "ranks"):
            one = SeriesStore(folder / SERIES / f"{place}.sqlite")
            one.append("job", now, {key("slow_chip_ratio", "a/0/1"): 1.5})
            one.close()
        saved = folder / CHECKPOINTS / "step-9"
        saved.mkdir(parents=True)
        os.utime(saved, (now - 500, now - 500))
        text = text_of(port)
        heat_line = 'tutti_chip_temperature_celsius{chip="0",node="3",pool="big-pool"} 50.0'
        assert heat_line in text.splitlines()
        counted = r'^tutti_nic_sent_bytes_total\{nic="a\\"b",node="3",pool="big-pool"\} (\S+)$'
        first = float(re.search(counted, text, re.MULTILINE)[1])  # type: ignore[index]
        assert 0 <= first <= 20  # what was before the server began is no part of it
        assert 'tutti_slow_chip_ratio{chip="a/0/1",node="",pool=""} 1.5' in text.splitlines()
        age = re.search(r"^tutti_checkpoint_age_seconds\{.*\} (\S+)$", text, re.MULTILINE)
        assert age is not None
        assert 499 <= float(age[1]) < 700
        time.sleep(max(0.0, now + 2 - time.time()))
        store.append("node", now + 2, {sent: 5.0})
        store.close()
        again = float(re.search(counted, text_of(port), re.MULTILINE)[1])  # type: ignore[index]
        assert again >= first + 5.0
    finally:
        server.close()


def test_what_is_old_is_not_told(folder: Path) -> None:
    store = SeriesStore(folder / SERIES / "a-0.sqlite")
    store.append("node", int(time.time()) - 300, {key("chip_temperature_celsius", "0"): 50.0})
    store.close()
    server, port = fetched(folder)
    try:
        assert "tutti_chip_temperature" not in text_of(port)
    finally:
        server.close()


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool on the PATH (Debian: prometheus)")
def test_promtool_finds_nothing_in_any_figure(folder: Path) -> None:
    store = SeriesStore(folder / SERIES / "a-0.sqlite")
    values = {key(name.removeprefix("tutti_"), "x"): 1.0 for name in FIGURES}
    store.append("node", int(time.time()), values)
    store.close()
    server, port = fetched(folder)
    try:
        text = text_of(port)
        assert all(re.search(rf"^{name}\{{", text, re.MULTILINE) for name in FIGURES)
        done = subprocess.run(
            [str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
    finally:
        server.close()
