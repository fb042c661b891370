"""`tutti doctor [CLUSTER]`: chips alone, then hosts in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tutti.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from tutti.diagnose.cluster.rounds import Round
    from tutti.diagnose.finding import Finding
    from tutti.hardware.profile import Profile


def check(
    cluster: str | None,
    *,
    profiles: Sequence[str],
    plan: Path | None,
    all_pairs: bool,
    device: str | None,
) -> Finding | None:
    """Check this machine, or under torchrun the hosts of a cluster; None on ranks but the first."""
    from tutti.accelerator.profiling.links import local_rank, num_ranks
    from tutti.diagnose.active.chips import chips_here, read_chip
    from tutti.diagnose.cluster.answer import check_finding

    known = _profiles(profiles)
    expected = _expected_rate(cluster)
    if num_ranks() == 1:
        if plan is not None or all_pairs:
            raise InputError(
                "doctor: --plan and --all-pairs test links between hosts; start it on each of them "
                "by torchrun"
            )
        readings = [read_chip(chip, known) for chip in chips_here(device)]
        notes = ["one host: its chips were checked, no links"]
        return check_finding(readings, None, [], notes)
    from tutti.diagnose.active import hosts as active

    rank, _ = active.join()
    try:
        names = active.everyones(active.host_of())
        chips = chips_here(device)
        readings = active.gather_readings(read_chip(chips[local_rank() % len(chips)], known))
        rounds = _rounds(len(dict.fromkeys(names)), plan, all_pairs=all_pairs)
        verdicts, count = active.check_hosts(names, rounds=rounds, expected=expected)
    finally:
        active.leave()
    if rank:
        return None
    source = "the cluster file" if expected else "the median pair"
    notes = [f"{count + 1} rounds; rates are held against {source}"]
    return check_finding(readings, verdicts, list(dict.fromkeys(names)), notes)


def _profiles(names: Sequence[str]) -> list[Profile]:
    from tutti.hardware.profile import Profile, shipped_profiles

    return [*(Profile.find(name) for name in names), *shipped_profiles().values()]


def _expected_rate(cluster: str | None) -> float | None:
    """Return the bytes per second that the slowest pool's NICs of a node should reach."""
    if cluster is None:
        return None
    from tutti.hardware.cluster import Cluster

    rates = [pool.node.nic_bandwidth for pool in Cluster.load(cluster).pools if pool.node.nics]
    return min(rates) if rates else None


def _rounds(hosts: int, plan: Path | None, *, all_pairs: bool) -> list[Round] | None:
    from tutti.diagnose.cluster import rounds

    if plan is None:
        return rounds.all_pairs(hosts) if all_pairs else None
    from tutti.diagnose.cluster.plan_edges import plan_edges
    from tutti.plan.files import load_plan

    nodes, edges = plan_edges(load_plan(plan))
    if len(nodes) != hosts:
        raise InputError(f"{plan}: is for {len(nodes)} hosts, {hosts} take part")
    return rounds.edge_rounds(edges)
