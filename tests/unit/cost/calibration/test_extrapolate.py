"""Extrapolating judges: nothing of what is scored was seen, and what made the runs is found."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.runs import PUBLISHED, as_csv, grid
from tutti.cost.calibration import extrapolate as judges
from tutti.cost.calibration.extrapolate import (
    CHIP,
    CLUSTER,
    REGIMES,
    STACK,
    Extrapolation,
    extrapolate,
)
from tutti.cost.calibration.fit import fit
from tutti.cost.calibration.stacks import stacks
from tutti.cost.calibration.table import RunTable, load_runs
from tutti.cost.constants import Constants, registry
from tutti.cost.families import families, family_median, family_priors
from tutti.cost.step import price


def table_of(rows: list[dict[str, str]], folder: Path) -> RunTable:
    file = folder / "runs.csv"
    file.write_text(as_csv(rows))
    return load_runs(file)[0]


def rows_of_two_kinds() -> list[dict[str, str]]:
    """Runs on up to 256 chips, and some on more."""
    rows = grid(24)
    for number, row in enumerate(rows):
        if number % 4 == 0:
            row |= {"n_gpus": "512", "dp": str(512 // int(row["tp"]) // int(row["pp"]))}
            row["gbs"] = str(int(row["dp"]) * int(row["mbs"]) * 2)
    return rows


def test_a_regime_is_scored_by_fits_that_saw_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(rows_of_two_kinds(), tmp_path)
    seen: list[set[str]] = []

    def watched(stack, rows, factors):  # type: ignore[no-untyped-def]
        seen.append({run.id for run in rows.runs})
        return fit(stack, rows, factors)

    monkeypatch.setattr(judges, "fit", watched)
    found = extrapolate(tmp_path / "runs.csv")
    judged = {one.id for one in found.judged if one.judge == "chips"}
    many = {run.id for i, run in enumerate(table.runs) if table.strategy.num_chips[i] > 256}
    assert judged == many
    assert many
    assert len(seen[0]) >= judges.LEAST_ROWS
    assert not seen[0] & many
    cells = {run.cell for run in table.runs if run.id in many}
    assert not any(run.cell in cells for run in table.runs if run.id in seen[0])


def test_runs_that_the_formulas_made_are_predicted_where_nothing_was_seen(tmp_path: Path) -> None:
    """With constants moved from their priors, the rows outside tell enough of those inside."""
    rows = rows_of_two_kinds()
    table = table_of(rows, tmp_path)
    moved = Constants(gemm_efficiency=0.7, hbm_efficiency=0.6)
    seconds = price(table.shape, table.strategy, table.machine, moved).step_seconds
    for row, value in zip(rows, seconds, strict=True):
        row["step_time_s"] = f"{value:.6f}"
    (tmp_path / "runs.csv").write_text(as_csv(rows))
    found = extrapolate(tmp_path / "runs.csv")
    assert found.by_judge["chips"].mean_pct < 3.0
    assert found.by_judge[CHIP].mean_pct > 10.0, "nobody has told of these constants"


def test_regimes_are_what_they_say(tmp_path: Path) -> None:
    rows = grid(6)
    rows[0] |= {"seq": "32768", "step_time_s": "60"}
    rows[1] |= {"hidden": "1024"}
    table = table_of(rows, tmp_path)
    inside = {regime.name: set(np.flatnonzero(regime.inside(table)).tolist()) for regime in REGIMES}
    assert inside["sequence"] == {0}
    assert inside["hidden"] == {1}
    assert not inside["chips"]
    assert not inside["experts"]


def test_an_architecture_s_belief_holds_for_its_chips_alone() -> None:
    for priors in families().values():
        for name, prior in priors.items():
            spec = registry()[name]
            assert spec.low <= prior.median <= spec.high
            assert prior.median != spec.prior, "then it need not be said"
            assert prior.source
    own = family_priors("H100")["flash_efficiency"]
    assert family_median("flash_efficiency", "H100") == own.median
    assert family_median("flash_efficiency", "A100-80") == registry()["flash_efficiency"].prior
    assert family_priors("a chip of nobody's") == {}


def test_a_stack_of_two_architectures_keeps_their_ratio(tmp_path: Path) -> None:
    rows = grid(4)
    for row in rows[2:]:
        row |= {"chip": "H100", "peak_tflops": "989"}
    table = table_of(rows, tmp_path)
    stack = replace(stacks()["flagperf"], chips=("A100-80", "H100"), groups=("lab",))
    found = judges.unfitted(stack).predict(table)
    each = [
        price(here.shape, here.strategy, here.machine, Constants(flash_efficiency=value))
        for chip in ("A100-80", "H100")
        for value in [family_median("flash_efficiency", chip)]
        for here in [table.take(np.array([r.chip == chip for r in table.runs]).nonzero()[0])]
    ]
    expected = np.concatenate([one.step_seconds for one in each])
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def inside_as_weighed(judged) -> float:
    """Return the percentage inside of intervals, rows weighed as widths are fitted to them.

    Counted row by row, one stack is three quarters of everything: whether its shared bias is a
    little less or more than an interval decides for all.
    """
    apart = [one for one in judged if one.judge not in (CHIP, CLUSTER)]
    counts = Counter((one.judge, one.stack) for one in apart)
    weights = np.array([counts[one.judge, one.stack] ** -0.5 for one in apart])
    return 100.0 * float(np.average([one.is_inside for one in apart], weights=weights))


@functools.cache
def published() -> Extrapolation:
    """Judge the published runs, once."""
    return extrapolate(PUBLISHED)


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.exists(), reason="the shared data are not here")
def test_the_published_runs_where_nothing_was_seen() -> None:
    """A little above what is reached; docs/results.md has the figures."""
    found = published()
    assert found.together is not None
    assert found.together.mean_pct < 12.0
    assert found.together.median_pct < 10.5
    assert found.together.regret_pct is not None
    assert found.together.regret_pct < 5.0
    assert found.by_judge[CHIP].mean_pct < 13.0
    assert found.by_judge[STACK].mean_pct < 13.0
    bars = {"chips": 7.0, "hidden": 12.0, "sequence": 5.0, "sharding": 3.0, "tensor": 4.0}
    for name, bar in bars.items():
        assert found.by_judge[name].mean_pct < bar, name
    for name in (STACK, CHIP, "hidden"):
        assert 72.0 <= found.by_judge[name].inside_pct <= 90.0, name
    assert 75.0 <= inside_as_weighed(found.judged) <= 85.0


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.exists(), reason="the shared data are not here")
@pytest.mark.xfail(strict=True, reason="85.5 % of rows on 19 November 2026: the bar is not reached")
def test_each_row_counts_once_in_the_intervals() -> None:
    found = published()
    assert found.together is not None
    assert 75.0 <= found.together.inside_pct <= 85.0
