"""The store of series: what comes back, at every level, and what bad files say."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tutti.errors import InputError
from tutti.observe.store import SeriesStore

BEGIN = 1_800_000_000  # the begin of an hour, so of every level's row


def filled(path: Path, *, seconds: int = 200, hosts: int = 2) -> SeriesStore:
    store = SeriesStore(path)
    for second in range(seconds):
        for host in range(hosts):
            store.append(f"h{host}", BEGIN + second, {"a": float(second), 'b{nic="x"}': 7.0})
    store.flush()
    return store


def test_seconds_come_back(tmp_path: Path) -> None:
    store = filled(tmp_path / "s.sqlite")
    first, second = store.read("a", BEGIN + 10, BEGIN + 150)
    assert (first.host, second.host) == ("h0", "h1")
    assert first.seconds.tolist() == list(range(BEGIN + 10, BEGIN + 150))
    np.testing.assert_allclose(first.mean, np.arange(10, 150), rtol=5e-4)
    assert store.names() == ["a", 'b{nic="x"}']
    (labelled,) = {s.name for s in store.read("b", BEGIN, BEGIN + 60)}
    assert labelled == 'b{nic="x"}'
    assert store.read("c", BEGIN, BEGIN + 60) == []
    store.close()


def test_levels_keep_least_mean_and_most(tmp_path: Path) -> None:
    store = SeriesStore(tmp_path / "s.sqlite")
    for second in range(120):
        store.append("h", BEGIN + second, {"a": 100.0 if second == 33 else 1.0})
    store.close()
    again = SeriesStore(tmp_path / "s.sqlite", read_only=True)
    (tens,) = again.read("a", BEGIN, BEGIN + 120, level=10)
    assert tens.seconds.tolist() == [BEGIN + 10 * i for i in range(12)]
    assert tens.most[3] == pytest.approx(100, rel=1e-3)
    assert tens.mean[3] == pytest.approx(10.9, rel=1e-3)
    assert tens.least[3] == pytest.approx(1, rel=1e-3)
    (minutes,) = again.read("a", BEGIN, BEGIN + 120, level=60)
    assert minutes.most[0] == pytest.approx(100, rel=1e-3)
    assert len(minutes.seconds) == 2


def test_gaps_and_new_figures_are_no_values(tmp_path: Path) -> None:
    store = SeriesStore(tmp_path / "s.sqlite")
    store.append("h", BEGIN, {"a": 1.0})
    store.append("h", BEGIN + 90, {"a": 2.0, "b": 3.0})
    store.flush()
    (a,) = store.read("a", BEGIN, BEGIN + 120)
    assert a.seconds.tolist() == [BEGIN, BEGIN + 90]
    store.close()


def test_a_run_that_goes_on_in_the_same_minute(tmp_path: Path) -> None:
    for part in (0, 20):
        store = SeriesStore(tmp_path / "s.sqlite")
        for second in range(part, part + 20):
            store.append("h", BEGIN + second, {"a": 5.0})
        store.close()
    again = SeriesStore(tmp_path / "s.sqlite", read_only=True)
    assert len(again.read("a", BEGIN, BEGIN + 60)[0].seconds) == 40


def test_points_take_little_room(tmp_path: Path) -> None:
    store = SeriesStore(tmp_path / "s.sqlite")
    noise = np.random.default_rng(1)
    names = tuple(f"figure{i}" for i in range(200))
    level = noise.uniform(1, 1e9, 200)
    for second in range(600):
        row = (level * (1 + 0.02 * noise.standard_normal(200))).astype(np.float32)
        store.append_row("h", BEGIN + second, names, row)
    store.close()
    assert (tmp_path / "s.sqlite").stat().st_size / (200 * 600) < 3.5  # of noise, the worst case


def test_bad_stores_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        SeriesStore(tmp_path / "nowhere", read_only=True)
    (tmp_path / "x").write_bytes(b"no database" * 500)
    with pytest.raises(InputError, match="damaged"):
        SeriesStore(tmp_path / "x", read_only=True)
    filled(tmp_path / "s").close()
    base = sqlite3.connect(tmp_path / "s")
    base.execute("update chunks set data = x'00'")
    base.commit()
    store = SeriesStore(tmp_path / "s", read_only=True)
    with pytest.raises(InputError, match="a row is damaged"):
        store.read("a", BEGIN, BEGIN + 60)
    base.execute("update facts set value = '9'")
    base.commit()
    base.close()
    with pytest.raises(InputError, match="version 9"):
        SeriesStore(tmp_path / "s", read_only=True)


@pytest.mark.slow
def test_a_store_that_another_process_holds_is_one_line(tmp_path: Path) -> None:
    filled(tmp_path / "s").close()
    base = sqlite3.connect(tmp_path / "s")
    base.execute("begin exclusive")
    with pytest.raises(InputError, match="another process holds the store; try again"):
        SeriesStore(tmp_path / "s", read_only=True).read("a", BEGIN, BEGIN + 60)
    base.rollback()
    base.close()
    assert SeriesStore(tmp_path / "s", read_only=True).read("a", BEGIN, BEGIN + 60)


def test_what_is_only_read_cannot_be_written(tmp_path: Path) -> None:
    filled(tmp_path / "s").close()
    store = SeriesStore(tmp_path / "s", read_only=True)
    store.append("h", BEGIN + 1000, {"a": 1.0})
    with pytest.raises(InputError, match="cannot be used"):
        store.flush()


def test_what_a_killed_writer_had_half_written_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    store = SeriesStore(path)
    store.append("a", 60, {"tutti_host_cpu_busy_ratio": 0.5})
    store.close()
    code = (
        "import os, sqlite3, sys\n"
        "base = sqlite3.connect(sys.argv[1])\n"
        "base.execute('pragma cache_size = 1')\n"
        "base.execute('update facts set value = value')\n"
        "for i in range(2000): base.execute('insert into chunks values (1, ?, ?, 1, ?)', "
        "(i, 'x', bytes(4000)))\n"
        "os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert path.with_name("run.sqlite-journal").exists()
    again = SeriesStore(path, read_only=True)
    (found,) = again.read("tutti_host_cpu_busy_ratio", 0, 100)
    assert found.mean.tolist() == [0.5]
    again.close_reading()


def test_a_store_that_another_process_holds_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    store = SeriesStore(path)
    store.append("host", 1_800_000_000, {"a": 1.0})
    store.close()
    holder = sqlite3.connect(path)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(InputError, match="another process holds the store"):
            SeriesStore(path, read_only=True).read("a", 1_800_000_000, 1_800_000_001)
    finally:
        holder.close()
    again = SeriesStore(path, read_only=True)
    assert again.read("a", 1_800_000_000, 1_800_000_001)
    again.close_reading()
