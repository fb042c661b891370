"""What `tutti fabric simulate` refuses, line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.simulate.test_fabric_step import cluster, plan
from tutti.cli import main
from tutti.errors import InputError
from tutti.plan.files import save_plan


@pytest.fixture
def plans(tmp_path: Path) -> dict[str, str]:
    half = plan(cluster().only({"h": tuple(range(4))}))
    whole = {"narrow": plan(cluster(4.0)), "wide": plan(cluster()), "part": half}
    for name, one in whole.items():
        save_plan(one, tmp_path / f"{name}.json")
    return {name: str(tmp_path / f"{name}.json") for name in whole}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("wide", "narrow"), "narrow.json and wide.json are plans for two clusters"),
        (("wide", "wide"), "both use chip h/0/0"),
        (("wide", "--fail", "leaf 99"), "leaf 99 is not among 0-"),
        (("wide", "--fail", "h/0/0"), "have no path left"),
        (("wide", "--connections", "0"), "must be at least 1"),
        (("wide", "--routing", "ecpm"), "did you mean 'ecmp'?"),
    ],
)
def test_each_mistake_is_one_line(plans: dict[str, str], words: tuple[str, ...], said: str) -> None:
    arguments = ["fabric", "simulate", *(plans.get(word, word) for word in words)]
    with pytest.raises(InputError, match=said) as raised:
        main.app(arguments, standalone_mode=False)
    assert "\n" not in str(raised.value)
