"""The search by the comparison formula, held against every plan of a tiny cluster."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.unit.cost.layer_folder import PUBLISHED, write_folder
from tutti.bench.plan_opt import metis_plan, opt_problem
from tutti.cost.measured.layer_profiles import MEGABYTE, LayerProfiles
from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.plan.check import check_plan
from tutti.search.exact.comparison_formula import Setting, score
from tutti.search.exact.comparison_search import search_by_formula

SETTING = Setting()


def cluster_of(fast: int, slow: int) -> Cluster:
    document = {
        "name": "tiny",
        "pools": [
            {"name": "a100", "chip": "A100-40", "chips_per_node": fast},
            {"name": "v100", "chip": "V100-16", "chips_per_node": slow},
        ],
    }
    return Cluster.from_document(document, Place("tiny"))


def teams(profiles: LayerProfiles, chips: tuple[int, int], micro_batch: int):
    """All sets of replicas with so many sequences on so many chips of each pool."""
    kinds = sorted(profiles.figures)
    found = []

    def extend(position, team, left, sequences):
        if sequences == micro_batch:
            found.append(tuple(team))
            return
        for k in range(position, len(kinds)):
            chip, tp, b = kinds[k]
            pool = 0 if chip == "A100" else 1
            if left[pool] >= tp and sequences + b <= micro_batch:
                rest = tuple(n - tp * (i == pool) for i, n in enumerate(left))
                extend(k, [*team, kinds[k]], rest, sequences + b)

    extend(0, [], chips, 0)
    return found


def best_of_all(profiles: LayerProfiles, chips: tuple[int, int], batch: int, depth: int) -> float:
    """The lowest score of all plans with up to `depth` stages, by the formula written out."""
    units, best = profiles.num_units, float("inf")
    for micro_batch in (m for m in range(1, batch + 1) if batch % m == 0):
        every = teams(profiles, chips, micro_batch)
        used = [
            tuple(sum(tp for c, tp, _ in team if c == chip) for chip in ("A100", "V100"))
            for team in every
        ]
        for stages in range(1, depth + 1):
            for chosen in itertools.product(range(len(every)), repeat=stages):
                if any(sum(used[t][p] for t in chosen) > chips[p] for p in range(2)):
                    continue
                for cuts in itertools.combinations(range(1, units), stages - 1):
                    bounds = list(itertools.pairwise((0, *cuts, units)))
                    best = min(best, written_out(profiles, every, chosen, bounds, batch))
    return best


def written_out(profiles, every, chosen, bounds, batch) -> float:
    times, closing, update = [], [], []
    for t, (start, stop) in zip(chosen, bounds, strict=True):
        figures = [(key[0], profiles.figures[key]) for key in every[t]]
        for chip, found in figures:
            if found.memory_bytes[start:stop].sum() / MEGABYTE > SETTING.memory_mb[chip]:
                return float("inf")
        count, wide = len(every[t]), sum(tp for _, tp, _ in every[t])
        rate = SETTING.inside_bandwidth if wide <= 8 else SETTING.between_bandwidth
        times.append(max(1e3 * f.seconds[start:stop].sum() for _, f in figures))
        moved = max(f.parameter_bytes[start:stop].sum() for _, f in figures)
        closing.append(2e3 * (count - 1) / count * moved / rate)
        update.append(max(1e3 * f.optimizer_s * (stop - start) / 26 for _, f in figures))
    beside = [max(b for t in pair for _, _, b in every[t]) for pair in itertools.pairwise(chosen)]
    micro_batch = sum(b for _, _, b in every[chosen[0]])
    wires = sum(2.0 * b * 2048 * 1024 * 2 / SETTING.between_bandwidth * 1e3 for b in beside)
    return (batch // micro_batch - 1) * max(times) + sum(times) + max(closing) + max(update) + wires


@pytest.mark.parametrize(("fast", "slow", "batch"), [(2, 1, 8), (1, 2, 4), (2, 2, 4)])
def test_it_finds_the_best_of_all_plans_of_a_tiny_cluster(tmp_path, fast, slow, batch):
    profiles = LayerProfiles.load(write_folder(tmp_path / "layers"))
    problem = opt_problem(8, profiles)
    problem = replace(
        problem, cluster=cluster_of(fast, slow), job=replace(problem.job, global_batch=batch)
    )
    found = search_by_formula(problem, profiles)
    best = best_of_all(profiles, (fast, slow), batch, depth=2)
    assert found.chips_step == 1
    assert found.score.step_ms <= best * (1 + 1e-9)  # it may have more stages
    assert found.bound_ms <= best * (1 + 1e-9)
    assert found.bound_ms <= found.score.step_ms
    again = score(found.plan, profiles, problem.model, problem.cluster)
    assert again == found.score
    assert [p for p in check_plan(found.plan) if p.code != "tied"] == []


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason=f"the published profiles are not in {PUBLISHED}")
@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_it_is_never_worse_than_the_published_plan(size):
    profiles = LayerProfiles.load(PUBLISHED)
    problem = opt_problem(size, profiles)
    found = search_by_formula(problem, profiles)
    metis = score(metis_plan(problem.model, problem.cluster), profiles)
    assert found.score.fits
    assert found.bound_ms <= found.score.step_ms <= metis.step_ms * (1 + 1e-12)
    if size == 64:
        assert found.score.step_ms < 0.99 * metis.step_ms


def test_a_third_pool_is_refused(tmp_path):
    profiles = LayerProfiles.load(write_folder(tmp_path / "layers"))
    problem = opt_problem(8, profiles)
    third = replace(problem.cluster.pools[0], name="third")
    cluster = replace(problem.cluster, pools=(*problem.cluster.pools, third))
    with pytest.raises(InputError, match="3 pools"):
        search_by_formula(replace(problem, cluster=cluster), profiles)
