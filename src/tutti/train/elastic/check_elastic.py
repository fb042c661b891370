"""What an elastic job is refused for before it begins."""

from __future__ import annotations

from tutti.elastic.store import parse_url
from tutti.errors import InputError, hint
from tutti.launch.identity import used_chips
from tutti.observe.folder import METRICS
from tutti.train.elastic.copy_price import check_memory, copy_price
from tutti.train.elastic.places import many_hosts_s, nodes_of
from tutti.train.run.planning import Job
from tutti.units import many


def check_elastic(job: Job) -> None:
    """Refuse what cannot go on: more chips than the cluster has, figures that no rank writes."""
    elastic = job.config.elastic
    assert elastic is not None
    most = sum(pool.num_chips for pool in job.cluster.pools)
    if elastic.min_chips > most:
        raise InputError(
            f"elastic.min_chips is {elastic.min_chips}, but cluster '{job.cluster.name}' has "
            f"{most} chips"
        )
    if elastic.node and not elastic.listen:
        raise InputError(
            "elastic.node is given, but not elastic.listen: without it all chips are here"
        )
    if elastic.node and elastic.node not in nodes_of(job):
        raise InputError(f"elastic.node is '{elastic.node}'; {hint(elastic.node, nodes_of(job))}")
    if elastic.store:
        parse_url(elastic.store)
        if not elastic.listen:
            raise InputError(
                "elastic.store is given, but not elastic.listen: with all chips on this host "
                "nobody else could lead"
            )
    least_s = 2 * many_hosts_s(job)
    if elastic.listen and elastic.death_after_s < least_s:
        raise InputError(
            f"elastic.death_after_s is {elastic.death_after_s:g}, but heartbeats of "
            f"{len(nodes_of(job))} hosts come every {least_s / 2:.2g} s; give it {least_s:.2g} at "
            "least"
        )
    _check_copies(job)
    measure = job.config.measure
    for name in ("tensorboard", "prometheus_port", "wandb", "mlflow", "tensors"):
        if getattr(measure, name):
            raise InputError(
                f"measure.{name}: not written by elastic runs yet, whose figures the controller "
                f"writes to {METRICS}; leave it out"
            )


def _check_copies(job: Job) -> None:
    """Refuse partners that are not there, and copies that no host has the memory for."""
    elastic = job.config.elastic
    assert elastic is not None
    hosts = len({(chip.pool, chip.node) for chip in used_chips(job.plan)}) if elastic.listen else 1
    if elastic.partners >= hosts:
        raise InputError(
            f"elastic.partners is {elastic.partners}, but the plan's chips are on "
            f"{many(hosts, 'host')}"
            + ("" if elastic.listen else " (without elastic.listen all are on this one)")
        )
    if elastic.copies:
        check_memory(copy_price(job))
