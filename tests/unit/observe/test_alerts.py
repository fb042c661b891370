"""Alerts: when a rule is met, for how long, and that it does not flap."""

from __future__ import annotations

import numpy as np
import pytest

from tutti.observe.alerts import Rule, alerts, own_rules
from tutti.observe.store import Series


def series(values: list[float]) -> Series:
    array = np.array(values, np.float32)
    return Series(host="h", name="tutti_host_memory_used_ratio", seconds=np.arange(len(values)),
                  mean=array, least=array, most=array)  # fmt: skip


def rule(**changes: object) -> Rule:
    return Rule(**{
        "name": "x", "figure": "tutti_host_memory_used_ratio", "says": "too much", "remedy": "less",
        "component": "host", "above": 0.9, "until": 0.8, "for_s": 3, **changes,
    })  # type: ignore[arg-type]  # fmt: skip


def test_it_begins_and_ends_after_its_time() -> None:
    (alert,) = alerts(rule(), [series([0.5] * 5 + [0.95] * 6 + [0.5] * 5)])
    assert (alert.begin, alert.end) == (5, 11)
    assert alert.worst == pytest.approx(0.95)
    assert alert.words() == "too much: tutti_host_memory_used_ratio was 0.95 on h, for 6 s"


def test_a_short_burst_is_none() -> None:
    assert alerts(rule(), [series([0.5, 0.95, 0.95, 0.5, 0.95, 0.5])]) == []


def test_it_does_not_flap_between_its_edges() -> None:
    values = [0.95] * 4 + [0.85, 0.92] * 20
    (alert,) = alerts(rule(), [series(values)])
    assert alert.end is None
    assert "still" in alert.words()


def test_below() -> None:
    (alert,) = alerts(rule(above=None, below=0.2, until=0.3), [series([1.0] * 3 + [0.1] * 5)])
    assert (alert.begin, alert.worst) == (3, pytest.approx(0.1))


def test_rules_of_the_package_are_sound() -> None:
    names = [one.name for one in own_rules()]
    assert len(names) == len(set(names)) > 8
    for wrong in ({"below": 0.1}, {"figure": "tutti_x"}, {"until": 0.95}):
        with pytest.raises(ValueError, match=r"either|no figure|beyond"):
            rule(**wrong)
