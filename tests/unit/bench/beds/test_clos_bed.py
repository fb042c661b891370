"""The Clos bed: its network as a cluster, and real flows on it where there is root."""

from __future__ import annotations

import os
from collections import Counter
from statistics import fmean

import numpy as np
import pytest

from tutti.bench.beds.bed_flows import Connection, predicted_rates, random_set, run_set
from tutti.bench.beds.clos_bed import MEGABIT, ClosBed, ClosSpec
from tutti.bench.beds.namespaces import why_not
from tutti.cli import main
from tutti.errors import InputError
from tutti.fabric.wiring import wire

needs_root = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def test_the_bed_is_a_cluster_with_the_same_links() -> None:
    spec = ClosSpec()
    wiring = wire(spec.cluster())
    (layer,) = wiring.layers
    assert (layer.ways, layer.cables, layer.switches) == (4, 1, 3)
    assert wiring.rates[0] == pytest.approx(40 * MEGABIT)
    assert wiring.rates[layer.up] == pytest.approx(20 * MEGABIT)


@needs_root
def test_ways_are_the_kernels_and_replies_take_the_same() -> None:
    bed = ClosBed(ClosSpec())
    try:
        ways = Counter()
        for port in range(20000, 20040):
            way = bed.way(0, 4, (port, 5004))
            assert way == bed.way(4, 0, (5004, port))
            ways[way] += 1
        assert set(ways) == {0, 1, 2, 3}
        assert bed.way(0, 1, (20000, 5001)) is None
        # two connections over one spine share its link; one alone is as fast as it
        spines: dict[int | None, list[int]] = {}
        for port in range(20000, 20010):
            spines.setdefault(bed.way(0, 4, (port, 5004)), []).append(port)
        twice = next(ports[:2] for ports in spines.values() if len(ports) > 1)
        rates = predicted_rates(bed, [Connection(0, 4, (port, 5004)) for port in twice])
        assert rates == pytest.approx(np.full(2, 10 * MEGABIT * 1448 / 1514))
        assert all(len({c.source // 3, c.target // 3}) == 2 for c in random_set(bed, 1))
    finally:
        bed.close()
    assert not bed.holders


@needs_root
def test_a_bed_that_its_cluster_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="offer as much"):
        ClosBed(ClosSpec(host_rate=5.0, up_rate=20.0))


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_flows_get_their_fair_shares() -> None:
    """Four of the twenty sets that `tutti bench fabric flows 20` runs."""
    bed = ClosBed(ClosSpec())
    try:
        found = [run_set(bed, random_set(bed, seed)) for seed in (2, 4, 8, 9)]
    finally:
        bed.close()
    assert fmean(one.mean_error for one in found) <= 0.08
    assert fmean(one.slowest_error for one in found) <= 0.08


@pytest.mark.parametrize("verb", ["flows", "faults", "healthy", "jobs", "failover"])
def test_without_root_every_bed_is_refused_in_one_line(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match="a test bed needs root") as raised:
        main.app(["bench", "fabric", verb, "1"], standalone_mode=False)
    assert "\n" not in str(raised.value)
