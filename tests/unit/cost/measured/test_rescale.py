"""A profile that a run has brought up to date."""

from __future__ import annotations

import pytest

from tutti.cost.measured.rescale import PassFactors, rescaled
from tutti.hardware.profile import Profile


def test_each_pass_is_scaled_by_its_own_factor(tmp_path):
    base = Profile.find("h200")
    factors = PassFactors(forward=1.5, backward=2.0, optimizer=3.0)
    found = rescaled(base, factors, why="by a run", date="2026-02-01")
    wanted = {"linear.forward": 1.5, "linear.weight_gradient": 2.0, "attention.backward": 2.0,
              "linear.input_gradient": 2.0, "adamw": 3.0, "add": 1.5}  # fmt: skip
    seen = set()
    for old, new in zip(base.operators, found.operators, strict=True):
        assert old.key == new.key
        if old.operator in wanted:
            assert new.seconds / old.seconds == pytest.approx(wanted[old.operator])
            seen.add(old.operator)
    assert seen == set(wanted)
    assert found.links == base.links
    assert found.origin.endswith("; by a run")
    found.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json").operators == found.operators
