"""Samplers against a machine that the test lays out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tutti.observe.figures import FIGURES, key
from tutti.observe.samplers.host import HostSampler
from tutti.observe.samplers.nic import NicSampler
from tutti.observe.step_figures import JUDGED_FIGURES, POOL_FIGURES, STEP_FIGURES


def lay(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_host(tmp_path: Path) -> None:
    lay(tmp_path, {
        "proc/stat": "cpu 100 0 100 800 0 0 0 0 0 0\n",
        "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 250 kB\n",
        "proc/pressure/io": "some avg10=12.50 avg60=0.00 avg300=0.00 total=1\n",
        "proc/diskstats": "8 0 sda 5 0 2 0 5 0 4 0 0 1500 0\n7 0 loop0 5 0 2 0 5 0 4 0 0 1 0\n",
    })  # fmt: skip
    said: list[str] = []
    sampler = HostSampler(said.append, tmp_path)
    assert said == ["this kernel counts no pressure (/proc/pressure)"]
    assert key("host_cpu_busy_ratio") not in sampler.sample()
    lay(tmp_path, {"proc/stat": "cpu 160 0 100 840 0 0 0 0 0 0\n"})
    values = sampler.sample()
    assert values[key("host_cpu_busy_ratio")] == pytest.approx(0.6)
    assert values[key("host_memory_used_ratio")] == 0.75
    assert values[key("host_pressure_ratio", "io")] == 0.125
    assert values[key("host_disk_read_bytes_total", "sda")] == 1024
    assert values[key("host_disk_busy_seconds_total", "sda")] == 1.5
    assert not any("loop0" in name for name in values)


def test_nics(tmp_path: Path) -> None:
    port = "sys/class/infiniband/mlx5_0/ports/1"
    lay(tmp_path, {
        "sys/class/net/eth0/statistics/rx_bytes": "10\n",
        "sys/class/net/eth0/statistics/rx_errors": "2\n",
        "sys/class/net/eth0/statistics/tx_errors": "3\n",
        "sys/class/net/lo/statistics/rx_bytes": "99\n",
        f"{port}/counters/port_rcv_data": "100\n",
        f"{port}/counters/symbol_error": "what\n",
        f"{port}/hw_counters/out_of_sequence": "4\n",
        "proc/net/snmp": "Tcp: A RetransSegs\nTcp: 1 17\n",
    })  # fmt: skip
    values = NicSampler(root=tmp_path).sample()
    assert values == {
        key("nic_received_bytes_total", "eth0"): 10,
        key("nic_errors_total", "eth0"): 5,
        key("rdma_received_bytes_total", "mlx5_0:1"): 400,
        key("rdma_out_of_sequence_total", "mlx5_0:1"): 4,
        key("tcp_retransmitted_segments_total"): 17,
    }


def test_a_bare_machine_has_nothing_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    assert HostSampler(said.append, tmp_path).sample() == {}
    assert NicSampler(said.append, tmp_path).sample() == {}
    assert len(said) == 2


def test_names_follow_prometheus_rules() -> None:
    units = ("ratio", "bytes", "seconds", "watts", "celsius", "hertz", "total", "reasons", "code")
    for name, figure in FIGURES.items():
        assert name.endswith(tuple(f"_{unit}" for unit in units)), name
        assert (figure.kind == "counter") == name.endswith("_total")
        assert figure.means
    assert key("nic_sent_bytes_total", 'a"\\\n') == 'tutti_nic_sent_bytes_total{nic="a\\"\\\\\\n"}'


def test_the_page_of_metrics_is_this_table() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text(encoding="utf-8")
    for name, figure in FIGURES.items():
        assert f"| `{name}` | {figure.kind} | {figure.label} | {figure.means} |" in page
    rows = set(re.findall(r"^\| `(tutti_\w+)`", page, re.MULTILINE))
    steps = (f.name for f in (*STEP_FIGURES, *POOL_FIGURES))
    assert rows == {*FIGURES, *steps, *JUDGED_FIGURES}
