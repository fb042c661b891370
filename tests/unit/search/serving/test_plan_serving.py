"""The planner of deployments: engines fit, mixtures are the best, baselines never win."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.support.deployments import CHAT, LIMITS
from tutti.cost.measured.chip import MeasuredChip
from tutti.cost.serving.engine_prices import engine_prices
from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.profile import Profile
from tutti.models.load import load_model
from tutti.plan.check import check_plan
from tutti.plan.serving import Lengths, Limits, Role, Service, Traffic
from tutti.search.serving import evaluate as evaluating
from tutti.search.serving.build_plan import build_plan
from tutti.search.serving.chains import chains
from tutti.search.serving.flows import Mixture, solve_flows
from tutti.search.serving.kinds import kinds_of
from tutti.search.serving.options import EngineOption, engine_options
from tutti.search.serving.planner import ALL_ROLES, plan_serving
from tutti.search.serving.question import ServeProblem, ServeSpace

QWEN = load_model("qwen3-8b")
SHORT = replace(CHAT, output=Lengths(mean=40, sigma=0.5, longest=128))


def _cluster(*pools: dict[str, object], name: str = "room") -> Cluster:
    return Cluster.from_document({"name": name, "pools": list(pools)}, Place(name))


TINY = _cluster(
    {"name": "h20", "chip": "H20", "nodes": 1, "chips_per_node": 2, "price_per_chip_hour": 1.0},
    {
        "name": "a100",
        "chip": "A100-80",
        "nodes": 1,
        "chips_per_node": 3,
        "price_per_chip_hour": 2.0,
    },
)


def _problem(**changes: object) -> ServeProblem:
    given = {
        "model": QWEN,
        "cluster": TINY,
        "service": Service(traffic=SHORT, limits=LIMITS),
        "space": ServeSpace(tp_max=2),
    }
    return ServeProblem(**{**given, **changes})  # type: ignore[arg-type]


def _options(problem: ServeProblem, roles: tuple[Role, ...] = ALL_ROLES) -> list[EngineOption]:
    return engine_options(problem, kinds_of(problem), roles)


def _brute_force(problem: ServeProblem, options: list[EngineOption]) -> float:
    """Return the best rate of all counts of engines that do both."""
    chips = {pool.name: pool.num_chips for pool in problem.cluster.pools}
    most = [
        min(chips[name] // number for name, number in option.chips.items()) for option in options
    ]
    best = 0.0
    for counts in itertools.product(*(range(number + 1) for number in most)):
        used = {
            name: sum(n * o.chips.get(name, 0) for n, o in zip(counts, options, strict=True))
            for name in chips
        }
        if all(used[name] <= chips[name] for name in chips):
            best = max(best, sum(n * o.rate for n, o in zip(counts, options, strict=True)))
    return best


def test_small_mixtures_equal_brute_force():
    problem = _problem()
    options = _options(problem, (Role.BOTH,))
    mixture = solve_flows(problem, options)
    assert mixture is not None
    assert mixture.rate == pytest.approx(_brute_force(problem, options), rel=2e-3)
    assert mixture.bound >= mixture.rate * (1 - 1e-9)


def test_bytes_beside_counts_of_chips_do_not_stop_the_solver():
    """Two H100 with 100 Gb/s links: HiGHS found nothing where rows differ by ten orders."""
    problem = _problem(
        cluster=_cluster({"name": "p0", "chip": "H100", "nodes": 1, "chips_per_node": 2}),
        service=Service(traffic=replace(SHORT, prompt=Lengths(mean=1000, sigma=1.0, longest=4096),
                                        output=Lengths(mean=300, sigma=0.8, longest=1024))),
    )  # fmt: skip
    options = _options(replace(problem, space=ServeSpace()))
    for factor in (0.99467438, 0.9925, 1.003):
        rated = [
            replace(o, rate=factor * o.rate, ideal=factor * o.rate) if o.role is Role.BOTH else o
            for o in options
        ]
        mixture = solve_flows(problem, rated)
        assert mixture is not None
        assert mixture.rate > 0


def test_separated_roles_are_bounded_by_both_sides_and_their_link():
    problem = _problem()
    options = [o for o in _options(problem) if o.role is not Role.BOTH]
    mixture = solve_flows(problem, options)
    assert mixture is not None
    made = sum(o.rate * n for o, n in mixture.engines if o.role is Role.PREFILL)
    taken = sum(o.rate * n for o, n in mixture.engines if o.role is Role.DECODE)
    assert mixture.rate <= min(made, taken) * (1 + 1e-6)
    assert mixture.rate == pytest.approx(sum(mixture.flows.values()))


def test_engines_fit_and_their_plan_is_valid():
    problem = _problem(model=load_model("qwen3-32b"))
    options = _options(problem)
    assert options
    for option in options:
        assert sum(option.layers) == problem.model.num_layers
        assert all(layers >= 1 for layers in option.layers)
    mixture = solve_flows(problem, options)
    assert mixture is not None
    plan = build_plan(problem, mixture)
    assert check_plan(plan) == []
    for pipeline in plan.pipelines:  # refuses what memory does not hold
        engine_prices(problem.model, TINY, pipeline, problem.longest)


def test_prefill_engines_of_a_pool_share_its_flow_by_their_rates():
    cluster = _cluster({"name": "h20", "chip": "H20", "nodes": 1, "chips_per_node": 8})
    problem = _problem(cluster=cluster)
    options = {(o.role, o.num_chips): o for o in _options(problem)}
    one, two = options[Role.PREFILL, 1], options[Role.PREFILL, 2]
    decode = options[Role.DECODE, 1]
    rate = one.rate + 2 * two.rate
    mixture = Mixture(
        engines=((one, 1), (two, 2), (decode, 2)), flows={("h20", "h20"): rate}, rate=rate,
        bound=rate,
    )  # fmt: skip
    plan = build_plan(problem, mixture)
    assert check_plan(plan) == []
    shares = [p.engine.share for p in plan.pipelines]
    assert shares == pytest.approx([one.rate / rate, 2 * two.rate / rate, 0.0])


def test_unlike_chips_share_a_pipeline_where_one_kind_is_short():
    cluster = _cluster(
        {"name": "l4", "chip": "L4", "nodes": 1, "chips_per_node": 2},
        {"name": "t4", "chip": "T4", "nodes": 1, "chips_per_node": 2},
    )
    problem = _problem(cluster=cluster, model=load_model("qwen2.5-14b"))
    found = {frozenset(kind.pool for kind in chain) for chain in chains(problem, kinds_of(problem))}
    assert frozenset(("l4", "t4")) in found
    alone = replace(problem, space=replace(problem.space, mix=False))
    found = {frozenset(kind.pool for kind in chain) for chain in chains(alone, kinds_of(alone))}
    assert frozenset(("l4", "t4")) not in found


def test_no_chain_has_more_chips_than_there_are():
    cluster = _cluster(
        {"name": "t4", "chip": "T4", "nodes": 4, "chips_per_node": 4},
        {"name": "h20", "chip": "H20", "nodes": 1, "chips_per_node": 2},
    )
    problem = _problem(cluster=cluster, model=load_model("qwen2.5-14b"))
    kinds = kinds_of(problem)
    room = {kind.pool: kind.groups * kind.tp for kind in kinds}
    for chain in chains(problem, kinds):
        for pool in room:
            assert sum(kind.tp for kind in chain if kind.pool == pool) <= room[pool]


@pytest.fixture(scope="module")
def answer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluating, "LONG_STEPS", 3000)
        return plan_serving(_problem())


def test_no_baseline_is_better_by_simulation(answer):
    assert answer.best.rate > 0
    assert answer.best.rate <= answer.bound * 1.001
    for row in answer.compared:
        assert (row.simulated or 0.0) <= answer.best.rate
        if row.name.startswith("even split"):  # the same engines, of which the slowest is full
            assert row.promised <= answer.best.promised * (1 + 1e-9)
        elif row.simulated is None:  # it was left out because it promises less
            assert row.promised <= answer.best.rate * (1 + 1e-9)
    names = {row.name for row in answer.compared}
    assert {"planned", "no separation", "each pool alone", "one pipeline per kind of chip"} <= names


def test_the_answer_keeps_the_limits(answer):
    result = answer.best.result
    assert result.keeps_limits
    assert check_plan(answer.plan) == []
    assert answer.plan.job.serving is not None


def test_fewest_chips_for_a_demand():
    few = Service(traffic=replace(SHORT, requests_per_s=5.0), limits=LIMITS)
    found = plan_serving(_problem(service=few, objective="chips"))
    assert found.plan.num_ranks == 1
    cheap = plan_serving(_problem(service=few, objective="cost"))
    assert cheap.plan.stages().__next__()[2].chips.pools == ("h20",)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": load_model("llama-3.1-405b")}, r"fits nowhere: weights take .* all chips have"),
        (
            {"service": Service(traffic=SHORT, limits=Limits(per_token_s=1e-4))},
            r"no engine keeps the limits: 100 µs per token \(one decode alone takes",
        ),
        (
            {"service": Service(traffic=SHORT, limits=Limits(first_token_s=1e-4))},
            r"first token within 100 µs \(a mean prompt alone takes",
        ),
        ({"objective": "chips"}, "the workload must say requests_per_s"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(changes, said):
    if "objective" in changes:
        traffic = replace(SHORT, requests_per_s=None)
        changes = {**changes, "service": Service(traffic=traffic, limits=LIMITS)}
    with pytest.raises(InputError, match=said) as refused:
        plan_serving(_problem(**changes))
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_demand_beyond_all_chips_names_what_they_serve():
    much = Service(traffic=replace(SHORT, requests_per_s=1e5), limits=LIMITS)
    with pytest.raises(InputError, match=r"the most that these chips serve within them is [\d.]+"):
        plan_serving(_problem(service=much, objective="chips"))


def test_what_is_cut_lowers_the_mean():
    lengths = Lengths(mean=338, sigma=0.8, longest=512)
    assert 250 < lengths.expected < 300
    assert Lengths(mean=100, sigma=0.5, longest=10**6).expected == pytest.approx(100)
    assert Traffic(prompt=lengths, output=lengths).longest == 1024


def test_the_rate_of_the_best_is_that_of_a_long_run(answer):
    """Whatever the short runs said, the rate is kept by as many requests as fill slots often."""
    problem, best = answer.problem, answer.best
    again = evaluating.confirm(problem, best, seed=5)
    assert again.rate >= 0.9 * best.rate


def test_short_runs_that_promise_too_much_are_corrected(monkeypatch):
    monkeypatch.setattr(evaluating, "LONG_STEPS", 6000)
    problem = _problem(space=ServeSpace(tp_max=1, separate=False))
    mixture = solve_flows(problem, _options(problem, (Role.BOTH,)))
    assert mixture is not None
    plan = build_plan(problem, mixture)
    found = evaluating.evaluate(problem, plan, mixture.rate)
    dreamt = replace(found, rate=3.0 * found.rate)
    kept = evaluating.confirm(problem, dreamt)
    assert 0.5 * found.rate < kept.rate < 1.6 * found.rate
    assert kept.result.keeps_limits


def test_simulations_go_by_the_profiles_that_were_given(monkeypatch):
    monkeypatch.setattr(evaluating, "MOST_STEPS", 1500)
    profile = Profile.find("h200")
    problem = _problem(
        cluster=_cluster({"name": "h200", "chip": "H200", "nodes": 1, "chips_per_node": 1}),
        space=ServeSpace(tp_max=1, separate=False),
    )
    slow = MeasuredChip(profile.slowed("H200", 3.0), Dtype.BF16)
    rates = []
    for measured in (None, {"h200": slow}):
        asked = replace(problem, measured=measured)
        mixture = solve_flows(asked, _options(asked, (Role.BOTH,)))
        assert mixture is not None
        rates.append(evaluating.evaluate(asked, build_plan(asked, mixture), mixture.rate).rate)
    assert 0.2 < rates[1] / rates[0] < 0.6
