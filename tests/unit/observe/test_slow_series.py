"""What is slow, step by step, as series; and every rule of the package, met and over."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from tutti.observe.alert_outlets import Outlets
from tutti.observe.alert_watch import AlertWatch
from tutti.observe.alerts import Rule, own_rules
from tutti.observe.figures import FIGURES, key
from tutti.observe.slow_series import FILE, SlowSeries
from tutti.observe.store import SeriesStore

NOW = 2_000_000_000
OF_HOSTS = [rule for rule in own_rules() if rule.figure.partition("{")[0] in FIGURES]


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AlertWatch:
    monkeypatch.setattr(time, "time", lambda: float(NOW))
    outlets = Outlets(events=tmp_path / "events.jsonl", say=lambda _: None)
    return AlertWatch(tmp_path, outlets, own_rules())


def test_there_is_no_file_until_something_is_slow(tmp_path: Path) -> None:
    series = SlowSeries(tmp_path / "series" / FILE)
    series.write({}, {}, at=NOW)
    assert not (tmp_path / "series").exists()
    series.write({"a/0/1": 1.5}, {}, at=NOW + 1)
    series.write({"a/0/1": 1.6}, {("a/0", "b/0"): 2.0}, at=NOW + 2)
    series.write({}, {}, at=NOW + 3)
    series.close()
    store = SeriesStore(tmp_path / "series" / FILE, read_only=True)
    (chip,) = store.read("tutti_slow_chip_ratio", NOW, NOW + 9)
    assert chip.name == key("slow_chip_ratio", "a/0/1")
    assert chip.mean.tolist() == pytest.approx([1.5, 1.6, 1.0], abs=1e-3)
    (link,) = store.read("tutti_slow_wire_ratio", NOW, NOW + 9)
    assert link.name == key("slow_wire_ratio", "a/0 – b/0")
    assert link.mean.tolist() == [2.0, 1.0]


def test_slow_parts_are_alerts_with_words_and_a_remedy(watch: AlertWatch, tmp_path: Path) -> None:
    series = SlowSeries(tmp_path / "series" / FILE)
    for second in range(1, 13):  # steps of a second; one that is slow for a moment is no alert
        series.write({"a/0/1": 1.5}, {}, at=NOW + second)
        series._flushed = 0.0
        if second == 5:
            assert watch.look(NOW + second) == []
    (notice,) = watch.look(NOW + 12)
    assert notice.alert.rule.name == "slow-chip"
    assert 'tutti_slow_chip_ratio{chip="a/0/1"} was 1.5' in notice.line()
    assert "doctor run" in notice.line()
    series._flushed = 0.0
    for second in range(13, 26):
        series.write({}, {("a/0", "b/0"): 2.0}, at=NOW + second)
        series._flushed = 0.0
    notices = {one.what: one for one in watch.look(NOW + 26)}
    assert {what: one.alert.rule.name for what, one in notices.items()} == {
        "began": "slow-link", "ended": "slow-chip",
    }  # fmt: skip
    assert notices["ended"].line() == "alert over: slow-chip (a/0/1)"
    assert "was 2 on the job, still" in notices["began"].line()
    series.close()


def test_a_folder_that_cannot_be_written_ends_it_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "series").write_text("a file")
    said: list[str] = []
    series = SlowSeries(tmp_path / "series" / FILE, say=said.append)
    for step in range(3):
        series.write({"a/0/1": 1.5}, {}, at=NOW + step)
    series.close()
    assert len(said) == 1
    assert "written no longer" in said[0]


@pytest.mark.parametrize("rule", OF_HOSTS, ids=lambda rule: rule.name)
def test_every_rule_of_hosts_is_met_and_over(watch: AlertWatch, tmp_path: Path, rule: Rule) -> None:
    (tmp_path / "series").mkdir()
    store = SeriesStore(tmp_path / "series" / "a-0.sqlite")
    label = FIGURES[rule.figure.partition("{")[0]].label
    name = rule.figure if "{" in rule.figure or not label else f'{rule.figure}{{{label}="x"}}'
    edge = rule.above if rule.above is not None else rule.below
    assert edge is not None
    bad = edge + 1e-2 * max(1.0, abs(edge)) if rule.above is not None else edge - 1e-2 * edge - 1e-4
    good = rule.until if rule.above is not None else 1.01 * rule.until
    length = int(rule.for_s) + 2
    heard = []
    for second in range(3 * length):
        value = bad if length <= second < 2 * length else good
        store.append("node-a", NOW + second, {name: value})
        if second % length == length - 1:
            store.flush()
            heard += [(one.what, one.alert.rule.name) for one in watch.look(NOW + second)]
    store.close()
    assert heard == [("began", rule.name), ("ended", rule.name)]


def test_every_kind_of_trouble_has_a_rule() -> None:
    names = {rule.name for rule in own_rules()}
    assert names >= {
        "no-step", "slow-chip", "slow-link", "over-forecast", "loss-jump", "loss-undefined",
        "data-starvation", "old-checkpoint", "disk-space", "disk-latency", "chip-heat", "chip-ecc",
        "chip-xid", "pfc-storm", "link-loss",
    }  # fmt: skip


def test_figures_that_come_and_go_leave_the_others_of_their_minute(tmp_path: Path) -> None:
    path, begin = tmp_path / "s.sqlite", NOW - NOW % 3600
    store = SeriesStore(path)
    for second in range(150):
        values = {"a_ratio": float(second)}
        values |= {"b_ratio": 2.0} if second >= 30 else {}
        values |= {"c_ratio": 3.0} if 70 <= second < 80 else {}
        store.append("h", begin + second, values)
        if second in (20, 100):  # of a run that was started again
            store.close()
            store = SeriesStore(path)
    store.close()
    read = SeriesStore(path, read_only=True)
    counts = {"a_ratio": 150, "b_ratio": 120, "c_ratio": 10}
    for name, count in counts.items():
        (one,) = read.read(name, begin, begin + 600)
        assert len(one.seconds) == count, name
    for level, wanted in ((10, 15), (60, 3)):
        (one,) = read.read("a_ratio", begin, begin + 600, level=level)
        assert one.least.tolist() == [float(level * i) for i in range(wanted)]
        (one,) = read.read("c_ratio", begin, begin + 600, level=level)
        assert one.seconds.tolist() == [begin + (70 if level == 10 else 60)]
    with sqlite3.connect(path) as base:
        assert base.execute("select count(*) from chunks where level > 1").fetchone() == (2,)


def test_what_comes_and_goes_is_told_once_each_time(watch: AlertWatch, tmp_path: Path) -> None:
    series = SlowSeries(tmp_path / "series" / FILE)
    heard: list[tuple[str, int]] = []
    for second in range(170):
        slow = second % 40 >= 20  # four times, each for twenty seconds
        series.write({"a/0/1": 1.5} if slow else {}, {}, at=NOW + second)
        series._flushed = 0.0
        heard += [(one.what, one.alert.begin - NOW) for one in watch.look(NOW + second)]
    series.close()
    assert heard == [(what, 20 + 40 * n) for n in range(4) for what in ("began", "ended")]
