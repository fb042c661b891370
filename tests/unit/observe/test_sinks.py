"""Where figures go: a file that survives a kill, Prometheus, TensorBoard."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.observe.test_record import rank, record
from tutti.errors import InputError
from tutti.observe.prometheus import Prometheus
from tutti.observe.record import StepRecord, by_pool
from tutti.observe.sinks import JsonLines, Sinks, TensorBoard, figure_lines


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def at(step: int) -> StepRecord:
    return replace(record(), step=step)


def test_lines_are_there_as_soon_as_they_are_written(path: Path) -> None:
    sink = JsonLines(path)
    sink.write(record())
    sink.validation(3, 2.25)
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["step"], first["loss"]) == (3, 2.5)
    assert second == {"step": 3, "validation_loss": 2.25}
    sink.close()


def test_a_resumed_run_goes_on_after_its_step_and_drops_half_a_line(path: Path) -> None:
    old = "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3, 4, 5))
    path.write_text(old + '{"step": 6, "lo', encoding="utf-8")
    sink = JsonLines(path, after=3)
    sink.validation(4, 2.0)
    sink.close()
    assert steps(path) == [1, 2, 3, 4]


def test_steps_that_wait_for_their_line_survive_a_kill(path: Path) -> None:
    sink = JsonLines(path)
    for step in range(1, 6):  # as a run does: two steps wait, the third is written
        waiting = [at(s) for s in (step - 1, step) if s > 0]
        if step > 2:
            sink.write(at(step - 2))
        sink.soon(waiting)
    for file in (sink._file, sink._soon):  # as the kernel does when it kills a process
        file.close()
    assert steps(path) == [1, 2, 3]
    assert [json.loads(line)["step"] for line in figure_lines(path)] == [1, 2, 3, 4, 5]
    again = JsonLines(path, after=4)
    assert steps(path) == [1, 2, 3, 4]
    again.write(at(5))
    again.close()
    assert steps(path) == [1, 2, 3, 4, 5]
    assert [p.name for p in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_step_is_not_told_twice(path: Path) -> None:
    sink = JsonLines(path)
    sink.soon([at(1), at(2)])
    sink.write(at(1))  # killed before the other file was written again
    assert [json.loads(line)["step"] for line in figure_lines(path)] == [1, 2]
    sink.soon([at(2)])
    assert [json.loads(line)["step"] for line in figure_lines(path)] == [1, 2]
    sink.close()


def test_a_new_run_begins_anew(path: Path) -> None:
    path.write_text('{"step": 1}\nnot json\n[]\n', encoding="utf-8")
    JsonLines(path).close()
    assert path.read_text() == ""


@pytest.fixture
def prometheus() -> Iterator[tuple[Prometheus, int]]:
    pytest.importorskip("prometheus_client", reason="needs tutti-ml[observe]")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sink = Prometheus(port)
    yield sink, port
    sink.close()


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in rows}


def test_prometheus_fetches_the_newest(prometheus: tuple[Prometheus, int]) -> None:
    sink, port = prometheus
    pools = by_pool([rank(compute_s=0.2), rank(compute_s=0.7)], ["fast", "slow"])
    sink.write(record(pools=pools))
    sink.validation(3, 2.0)
    found = scraped(port)
    assert found["tutti_step"] == 3
    assert found["tutti_loss"] == 2.5
    assert found['tutti_pool_compute_seconds{pool="fast"}'] == 0.2
    assert found['tutti_pool_compute_seconds{pool="slow"}'] == 0.7
    assert found["tutti_validation_loss"] == 2.0


def test_a_port_in_use_is_said(prometheus: tuple[Prometheus, int]) -> None:
    _, port = prometheus
    with pytest.raises(InputError, match=f"prometheus_port: {port} cannot be listened on"):
        Prometheus(port)


@pytest.mark.filterwarnings("ignore")  # of TensorBoard's own imports
def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tensorboard", reason="needs tutti-ml[observe]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path / "board")
    sink.write(record(pools=by_pool([rank(compute_s=0.25)], ["fast"])))
    sink.validation(3, 2.0)
    sink.close()
    found = EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    assert {"loss", "validation_loss", "fast/compute_s"} <= set(found.Tags()["scalars"])
    (event,) = found.Scalars("fast/compute_s")
    assert (event.step, event.value) == (3, 0.25)


def test_all_sinks_get_everything(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    sinks = Sinks([JsonLines(path), JsonLines(other)])
    sinks.write(record())
    sinks.validation(4, 1.0)
    sinks.close()
    assert path.read_text() == other.read_text() != ""
