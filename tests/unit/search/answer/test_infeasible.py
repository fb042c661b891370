"""What fits is found, and what does not is answered with the least it needs and a cheap remedy."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.models.plain_decoder import plain_gpt
from tutti.plan.job import Job
from tutti.search.ask_from_values import Limits, make_problem
from tutti.search.planner import plan
from tutti.search.question.effort import Effort
from tutti.search.question.space import Problem, Space
from tutti.units import parse

ODD = """\
name: odd
pools:
  - {name: a800, node: HGX-A800, nodes: 3}
  - {name: ascend, node: Atlas-16x910B, nodes: 2}
  - {name: p800, node: OAM-8xP800, nodes: 5}
  - {name: l40s, node: PCIe-8xL40S, chips_per_node: 6}
"""
PARTS = Effort(last_mile=0)  # what fits is found before any local search
ONE = "name: one\npools: [{name: h200, chip: H200, chips_per_node: 1}]\n"


def cluster_of(tmp_path, text: str) -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return Cluster.load(path)


def with_chip(cluster: Cluster, *, memory: float, host: float | None = None) -> Cluster:
    """Return the cluster of one pool with other memory on its chips and hosts."""
    (pool,) = cluster.pools
    node = replace(pool.node, chip=replace(pool.chip, memory_bytes=memory))
    if host is not None:
        node = replace(node, host=replace(node.host, memory_bytes=host))
    return replace(cluster, pools=(replace(pool, node=node),))


@pytest.mark.slow
def test_what_one_micro_batch_can_do_is_found_among_all(tmp_path):
    """On four pools the fastest configurations are all too large; others of the space do fit."""
    asked = make_problem("deepseek-v3", cluster_of(tmp_path, ODD))
    found = plan(asked, compare=False, effort=PARTS).best
    assert found.estimate.fits
    one = make_problem("deepseek-v3", asked.cluster, limits=Limits(micro_batch=(1,)))
    assert found.step_seconds <= plan(one, compare=False, effort=PARTS).best.step_seconds


def test_one_sequence_with_master_weights_fits_an_h200(tmp_path):
    """Measured: 125 GiB at the peak. Gradients come as activations go, in the weights' dtype."""
    cluster = cluster_of(tmp_path, ONE)
    limits = Limits(offload=False, recompute=False)
    asked = make_problem("llama-3.1-8b", cluster, global_batch=1, limits=limits)
    (memory,) = plan(asked, compare=False).best.estimate.memory
    peak = (memory.total - memory.runtime) / 2**30
    assert peak == pytest.approx(125, rel=0.03)
    assert memory.gradients == 0
    with pytest.raises(InputError, match=r"needs 1\d\d\.\d GiB of the 140\.4 GiB"):
        plan(make_problem("llama-3.1-8b", cluster, global_batch=2, limits=limits))


def small(cluster: Cluster, **space: object) -> Problem:
    model = plain_gpt(layers=4, hidden=2048, heads=16, vocab=32000, style="llama", name="small")
    return Problem(
        model=model,
        cluster=cluster,
        job=Job(sequence_length=2048, global_batch=16),
        space=Space(**space),  # type: ignore[arg-type]
    )


def refusal(asked: Problem) -> str:
    with pytest.raises(InputError, match="does not fit") as error:
        plan(asked, compare=False)
    return str(error.value)


@pytest.mark.slow  # the cheapest change asks for the same number
def test_the_least_that_is_needed_is_said(tmp_path):
    alone = cluster_of(tmp_path, ONE)
    states = small(alone).model.num_parameters * 18.0
    asked = small(with_chip(alone, memory=states), offload=())
    said = re.search(r"needs ([\d.]+ \w+) of the", refusal(asked))
    assert said is not None
    needed = parse(said[1], "bytes")
    free = plan(replace(asked, unlimited_memory=True), compare=False).best.estimate.tightest
    assert needed < 0.7 * free.total  # without a limit all activations are kept
    enough = plan(replace(asked, cluster=with_chip(alone, memory=1.01 * needed)), compare=False)
    assert enough.best.estimate.tightest.total > 0.95 * needed


def test_the_cheapest_change_comes_before_hardware(tmp_path):
    alone = cluster_of(tmp_path, ONE)
    states = small(alone).model.num_parameters * 18.0
    roomy = with_chip(alone, memory=2.5 * states)
    limited = refusal(small(roomy, offload=(), recompute=("none",), sequences=(16,)))
    assert limited.endswith("cheapest change that fits: --micro-batch 1")
    no_host = small(with_chip(alone, memory=states, host=1.0))
    assert "cheapest change that fits: --precision pure_bf16 (states of 8 instead of 18" in (
        refusal(no_host)
    )
