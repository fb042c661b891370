"""Failures of known cause (`benchmarks/doctor_cases`), and what the doctor makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.doctor_logs import PARTS, answered, cases, score
from tutti.diagnose.finding import Component

EVERY = cases()
KILLED = "https://github.com/c3nl-neuraldynamics/c3nl_cluster/issues/20"  # by whom, nobody found
SYMPTOMS = [
    case
    for case in EVERY
    if case.component == Component.UNDETERMINED.value and case.source != KILLED
]
DRAWN = ("tenth", "eleventh")  # whose misses left are of labels that their lines do not tell


def test_the_set_is_large_and_its_halves_are_fixed() -> None:
    assert len(EVERY) >= 150
    sizes = {part: sum(case.part == part for case in EVERY) for part in PARTS}
    assert (sizes["first"], sizes["second"]) == (100, 86)


def test_symptoms_alone_stay_undetermined(tmp_path: Path) -> None:
    assert len(SYMPTOMS) >= 20
    for case in SYMPTOMS:
        found = answered(case, tmp_path)
        assert found.component is Component.UNDETERMINED, case.source
        assert not found.healthy, case.source
        assert found.next_steps, case.source


def test_a_kill_alone_is_never_sure(tmp_path: Path) -> None:
    (case,) = (case for case in EVERY if case.source == KILLED)
    assert answered(case, tmp_path).confidence < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("part", [part for part in PARTS if part not in DRAWN])
def test_answers(part: str, tmp_path: Path) -> None:
    found = score([(case, answered(case, tmp_path)) for case in EVERY if case.part == part])
    assert found.right >= 0.8 * found.cases
    assert found.right > found.keywords_right
    assert found.sure_wrong <= max(1, 0.05 * found.sure)
    assert found.mean_confidence - found.named_right / found.named <= 0.1
    assert found.told_right >= 0.9 * found.told


@pytest.mark.slow
def test_confidence_is_the_share_of_right_answers(tmp_path: Path) -> None:
    # what is stated is of failures that nobody has seen (of 100, 83 are right); every part here has
    # been learnt from since it was scored, so that it may say too little of them, not too much
    found = score([(case, answered(case, tmp_path)) for case in EVERY])
    assert found.mean_confidence <= found.named_right / found.named


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="12 points too low of parts that were learnt from")
def test_confidence_is_within_ten_points_of_it(tmp_path: Path) -> None:
    found = score([(case, answered(case, tmp_path)) for case in EVERY])
    assert abs(found.mean_confidence - found.named_right / found.named) <= 0.1


@pytest.mark.slow
@pytest.mark.parametrize("part", DRAWN)
def test_answers_to_the_newest_parts(part: str, tmp_path: Path) -> None:
    found = score([(case, answered(case, tmp_path)) for case in EVERY if case.part == part])
    assert found.right >= 0.75 * found.cases
    assert found.right >= 1.5 * found.keywords_right
    assert found.sure_wrong <= 2
    assert abs(found.mean_confidence - found.named_right / found.named) <= 0.1
    assert found.told_right >= 0.9 * found.told
