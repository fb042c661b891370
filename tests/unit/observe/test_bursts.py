"""Bursts: asked for by a file, answered by every host that samples, once."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tutti.cli.main import app
from tutti.errors import InputError
from tutti.observe.samplers.bursts import (
    REQUEST,
    ask_for_burst,
    burst_figures,
    read_burst,
    request_in,
    take_back,
)
from tutti.observe.samplers.sampler import Values
from tutti.observe.samplers.sampling import HostSampling


class Wave:
    """A gauge that swings, a counter, and a figure that nobody knows."""

    def __init__(self) -> None:
        self.calls = 0

    def sample(self) -> Values:
        self.calls += 1
        return {
            "tutti_swing_ratio": float(self.calls % 2), "tutti_still_ratio": 0.5,
            "tutti_grows_total": 3.0 * self.calls, "tutti_unknown_ratio": math.nan,
        }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "series").mkdir()
    return tmp_path / "series"


def test_two_hosts_answer_once(folder: Path) -> None:
    waves = [Wave(), Wave()]
    hosts = [
        HostSampling(folder / f"a-{i}.sqlite", samplers=[wave], every_s=0.2)
        for i, wave in enumerate(waves)
    ]
    try:
        request = ask_for_burst(folder, 1.0)
        ends = time.monotonic() + 30.0
        while len(list(read_burst(folder, request))) < 10 and time.monotonic() < ends:
            time.sleep(0.05)
        time.sleep(1.5)
        rows = list(read_burst(folder, request))
        time.sleep(0.5)
        assert list(read_burst(folder, request)) == rows  # it is over, and not answered again
    finally:
        for host in hosts:
            host.close()
    assert len(list(folder.glob("burst-*.jsonl"))) == 2
    assert all("tutti_unknown_ratio" not in row.values for row in rows)
    figures = burst_figures(iter(rows))
    assert figures[0].figure in ("tutti_swing_ratio", "tutti_grows_total")
    assert figures[-1].figure == "tutti_still_ratio"
    still = figures[-1]
    assert (still.least, still.mean, still.most) == (0.5, 0.5, 0.5)
    assert sum(one.samples for one in figures if one.figure == "tutti_still_ratio") == len(rows)


def test_a_request_of_before_is_not_answered(folder: Path) -> None:
    request = ask_for_burst(folder, 60.0)
    wave = Wave()
    host = HostSampling(folder / "a-0.sqlite", samplers=[wave], every_s=0.02)
    ends = time.monotonic() + 30.0
    while wave.calls < 10 and time.monotonic() < ends:
        time.sleep(0.02)
    host.close()
    assert wave.calls >= 10
    assert list(read_burst(folder, request)) == []


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"name": "x"}', '{"name": "../up", "seconds": 3}',
     '{"name": "a", "seconds": 1e9}', '{"name": "a", "seconds": -1}'],
)  # fmt: skip
def test_requests_that_are_none(folder: Path, text: str) -> None:
    (folder / REQUEST).write_text(text)
    assert request_in(folder) is None


def test_what_cannot_be_asked(tmp_path: Path, folder: Path) -> None:
    for seconds in (0.0, -1.0, 601.0, math.nan):
        with pytest.raises(InputError, match="at most 600"):
            ask_for_burst(folder, seconds)
    with pytest.raises(InputError, match="no such folder"):
        ask_for_burst(tmp_path / "nothing", 1.0)
    take_back(folder)  # nothing is there to take back


def test_lines_that_are_not_whole_are_left_out(folder: Path) -> None:
    request = ask_for_burst(folder, 1.0)
    good = json.dumps({"at": 1.0, "host": "h", "values": {"tutti_x_ratio": 2.0}})
    file = folder / f"burst-{request.name}-a-0.jsonl"
    file.write_text(f'{good}\n{{"at": 2.0, "host": "h"}}\nnonsense\n{good[:20]}')
    (row,) = read_burst(folder, request)
    assert row.values == {"tutti_x_ratio": 2.0}


def test_the_verb(tmp_path: Path, folder: Path) -> None:
    host = HostSampling(folder / "a-0.sqlite", samplers=[Wave()], every_s=0.45)
    table = tmp_path / "all.csv"
    try:
        said = CliRunner().invoke(
            app, ["doctor", "burst", str(tmp_path), "--seconds", "0.6", "-o", str(table), "--json"]
        )
    finally:
        host.close()
    assert said.exit_code == 0, said.output
    figures = {one["figure"]: one for one in json.loads(said.stdout)}
    assert figures["tutti_swing_ratio"]["least"] == 0.0
    assert figures["tutti_swing_ratio"]["most"] == 1.0
    assert table.read_text().splitlines()[0] == "at,host,figure,value"
    assert not (folder / REQUEST).exists()


def test_nobody_answers(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.cli.doctor.burst.LATE_S", 0.0)
    said = CliRunner().invoke(app, ["doctor", "burst", str(tmp_path), "--seconds", "0.1"])
    assert said.exit_code != 0
    assert isinstance(said.exception, InputError)
