"""Which program runs: overrides, what a Plan says, and what the cost model chooses."""

from __future__ import annotations

import pytest

from tutti.collective import Group, Island, Operation
from tutti.comm import Place, Topology
from tutti.comm.choice import Chooser, Named, keeps_bits, parse_overrides
from tutti.comm.edge_rates import Measured, comm_links, link_name, measured_links
from tutti.cost.network.group_links import GroupLinks
from tutti.cost.network.program_rates import lower_bound_seconds
from tutti.cost.network.tuned_programs import Tuned, group_shape
from tutti.errors import InputError
from tutti.hardware.profile import CollectiveTime, LinkFigure, Profile

MIB = 1 << 20


def links(*rates: float, per_host: int = 1) -> GroupLinks:
    places = [
        Place(host=f"h{rank // per_host}", bandwidth=rate, rail=rank % per_host)
        for rank, rate in enumerate(rates)
    ]
    topology = Topology(tuple(places))
    return comm_links(topology.group(range(len(rates))), topology)


def test_overrides_are_read() -> None:
    found = parse_overrides("all_reduce=hierarchical:chunks=4:across=direct; all_to_all=rail")
    assert found["all_reduce"] == Named(algorithm="hierarchical", chunks=4, across="direct")
    assert found["all_to_all"] == Named(algorithm="rail")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all_redoce=ring", "did you mean 'all_reduce'"),
        ("all_reduce=rong", "did you mean 'ring'"),
        ("all_reduce=ring:chanks=2", "did you mean 'chunks'"),
        ("all_reduce=ring:chunks=0", "at least 1"),
    ],
)
def test_wrong_overrides_are_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_overrides(text)


def test_the_environment_goes_before_the_plan_and_the_plan_before_the_price() -> None:
    chooser = Chooser(links(1e8, 1e8), environment={})
    automatic = chooser.choose(Operation.ALL_REDUCE, MIB)
    chooser.obey("all_reduce", Named(algorithm="tree"))
    assert chooser.choose(Operation.ALL_REDUCE, MIB).algorithm == "tree"
    chooser.obey("all_reduce", None)
    assert chooser.choose(Operation.ALL_REDUCE, MIB) == automatic
    forced = Chooser(links(1e8, 1e8), environment={"TUTTI_COMM": "all_reduce=double_tree"})
    forced.obey("all_reduce", Named(algorithm="tree"))
    assert forced.choose(Operation.ALL_REDUCE, MIB).algorithm == "double_tree"


def test_slow_nics_reduce_less() -> None:
    chooser = Chooser(links(12.5e6, 50e6, 12.5e6, 50e6), environment={})
    assert chooser.choose(Operation.ALL_REDUCE, 16 * MIB).algorithm == "proportional"


def test_rails_are_used_side_by_side() -> None:
    chooser = Chooser(links(*[12.5e6] * 8, per_host=2), environment={})
    assert chooser.choose(Operation.ALL_REDUCE, 16 * MIB).algorithm == "hierarchical"


def test_a_slow_spine_makes_all_to_all_stay_on_its_rails() -> None:
    plain = links(*[12.5e6] * 8, per_host=2)
    figures = [
        LinkFigure(kind=link_name(edge), latency_s=2e-4, bandwidth=rate)
        for edge, rate in (("rail", 12e6), ("cross", 3e6), ("island", 1e9))
        for edge in [next(e for e, _ in plain.wires if e.value == edge)]
    ]
    slow = Chooser(measured_links(plain, figures), environment={})
    assert slow.choose(Operation.ALL_TO_ALL, 64 * MIB).algorithm == "rail"
    assert Chooser(plain, environment={}).choose(Operation.ALL_TO_ALL, 64 * MIB) is not None


def test_measured_times_go_before_prices() -> None:
    plain = links(1e8, 1e8, 1e8)
    group = plain.group
    automatic = Chooser(plain, environment={}).choose(Operation.ALL_REDUCE, MIB)
    other = "tree" if automatic.algorithm != "tree" else "ring"
    rows = [
        CollectiveTime(
            operation="all_reduce",
            group=group_shape(group),
            bytes=float(MIB),
            algorithm=algorithm,
            chunks=1,
            seconds=seconds,
        )
        for algorithm, seconds in ((automatic.algorithm, 1.0), (other, 1e-4))
    ]
    chosen = Chooser(plain, Tuned(rows), environment={}).choose(Operation.ALL_REDUCE, MIB)
    assert chosen.algorithm == other


def test_times_are_interpolated_between_sizes_and_not_far_beyond() -> None:
    rows = [
        CollectiveTime(operation="all_reduce", group="1 1", bytes=b, algorithm="ring", seconds=s)
        for b, s in ((1e6, 0.1), (4e6, 0.4))
    ]
    tuned = Tuned(rows)
    between = tuned.seconds(Operation.ALL_REDUCE, "1 1", "ring", 1, 2e6)
    assert between == pytest.approx(0.2)
    assert tuned.seconds(Operation.ALL_REDUCE, "1 1", "ring", 1, 1e8) is None
    assert tuned.seconds(Operation.ALL_REDUCE, "1 1", "ring", 4, 2e6) is None


def test_the_lower_bound_of_an_all_reduce() -> None:
    pair = links(1e6, 1e6)
    rate = pair.rates[0]
    assert lower_bound_seconds(Operation.ALL_REDUCE, 1e6, pair) == pytest.approx(1e6 / rate)
    four = links(1e6, 1e6, 1e6, 1e6)
    assert lower_bound_seconds(Operation.ALL_REDUCE, 1e6, four) == pytest.approx(1.5e6 / rate)
    unequal = links(1e6, 4e6, 1e6, 4e6)
    assert lower_bound_seconds(Operation.ALL_REDUCE, 1e6, unequal) == pytest.approx(1e6 / rate)


def test_compression_needs_a_program_that_leaves_the_same_bits() -> None:
    group = Group.of([[0, 1], [2, 3]])
    assert keeps_bits(Operation.ALL_REDUCE, "hierarchical", group)
    assert not keeps_bits(Operation.ALL_REDUCE, "ring", group)
    assert keeps_bits(Operation.ALL_REDUCE, "ring", Group.of([[0], [1]]))
    assert keeps_bits(Operation.ALL_TO_ALL, "direct", group)


def test_shapes_leave_ranks_out() -> None:
    one = Group((Island(ranks=(0, 1), bandwidths=(1e9, 2e9)), Island(ranks=(2,))))
    other = Group((Island(ranks=(5, 3), bandwidths=(1e6, 2e6)), Island(ranks=(9,))))
    assert group_shape(one) == group_shape(other)
    assert group_shape(one) != group_shape(Group.of([[0, 1], [2]]))


def test_a_profile_keeps_the_table(tmp_path) -> None:  # type: ignore[no-untyped-def]
    row = CollectiveTime(
        operation="all_reduce", group="2 2", bytes=1e6, algorithm="ring", chunks=4, seconds=0.5
    )
    profile = Profile(chip="CPU", origin="test", launch_floor_s=0.0, collectives=(row,))
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json").collectives == (row,)


def test_a_program_of_the_plan_that_cannot_run_is_refused() -> None:
    chooser = Chooser(links(1e8, 1e8), environment={"TUTTI_COMM": "all_gather=native"})
    chooser.follow(lambda operation, num_bytes: Named(algorithm="native", by="plan"))
    with pytest.raises(InputError, match="all_reduce: 'native' needs one island; the group of"):
        chooser.choose(Operation.ALL_REDUCE, MIB)
    chooser.follow(lambda operation, num_bytes: None)
    assert chooser.choose(Operation.ALL_GATHER, MIB).by == "cost"  # an override is for whoever can


def profile(chip: str, bandwidth: float, *times: CollectiveTime) -> Profile:
    link = LinkFigure(kind="comm rail", latency_s=1e-4 / bandwidth * 1e8, bandwidth=bandwidth)
    return Profile(chip=chip, origin="test", launch_floor_s=0.0, links=(link,), collectives=times)


def test_unlike_chips_are_as_fast_as_the_slowest_of_them() -> None:
    row = CollectiveTime(
        operation="all_reduce", group="1 1", bytes=MIB, algorithm="ring", seconds=1.0
    )
    slow, fast = profile("a", 1e8, row), profile("b", 1e9)
    known = Measured({"a": slow, "b": fast})
    assert known.of(["a", "a"]) == (slow.links, (row,))
    assert known.of(["b"]) == (fast.links, ())
    (link,), programs = known.of(["b", "a"])
    assert (link.bandwidth, link.latency_s, programs) == (1e8, slow.links[0].latency_s, ())
    assert known.of(["a", "c"]) == ((), ())
    assert Measured(fast).of(["whatever"]) == (fast.links, ())
    assert len({Measured(p).fingerprint() for p in (None, slow, fast, {"a": slow})}) == 4
