"""Weight decay moves matrices and embeddings; norms and biases only where that is asked for.

That every plan does it alike, in flat and ragged shards too, is what `test_any_plan` checks.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.any_plan import PLANS
from tests.support.threads import World
from tests.support.tiny_configs import TINY
from tests.support.training import batches_of, engine_of, in_fp32, settings, whole_tensors
from tutti.models import read_config
from tutti.ownership.ownership import Block
from tutti.train.state.weight_decay import runs


@given(
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=6),
    st.data(),
)
def test_runs_cover_a_shard(blocks: list[tuple[int, bool]], data: st.DataObject) -> None:
    made = [Block(0, str(i), ((0, size),), decays) for i, (size, decays) in enumerate(blocks)]
    flags = [decays for size, decays in blocks for _ in range(size)]
    start = data.draw(st.integers(0, len(flags)))
    stop = data.draw(st.integers(start, len(flags)))
    found = runs(made, start, stop, lambda block: block.decays)
    assert [flag for flag, size in found for _ in range(size)] == flags[start:stop]
    assert all(a[0] is not b[0] for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("name", TINY)
def test_what_decays(name: str) -> None:
    """By names and dimensions, which the rule does not look at: the field's convention."""
    spec = read_config(TINY[name], name)
    for unit in range(spec.num_units):
        for parameter in spec.parameters(unit):
            vector = len(parameter.shape) == 1
            named = "norm" in parameter.name or parameter.name.endswith("bias")
            assert parameter.decays == (not vector and not named), parameter.name


SHARDED = [n for n, p in PLANS.items() if any(s.shard_level for s in p.synchronisation)][:2]


@pytest.mark.parametrize("name", [next(iter(PLANS)), *SHARDED])
def test_vectors_decay_where_asked(name: str) -> None:
    """One step with and without: vectors differ by what decay takes, matrices not at all."""
    plan = in_fp32(PLANS[name], "adamw")
    spec = plan.model.spec
    assert spec is not None
    base = settings()

    def trained(vectors: bool, steps: int) -> dict[str, torch.Tensor]:
        def one(links):  # type: ignore[no-untyped-def]
            engine = engine_of(plan, spec, links)
            for step in range(steps):
                engine.step(batches_of(engine, step), replace(base, decay_vectors=vectors))
            return engine.weights()

        parts = [part for own in World(plan.num_ranks).run(one) for part in own]
        return whole_tensors(spec, parts, "weights")

    start, without, with_ = trained(False, 0), trained(False, 1), trained(True, 1)
    vectors = {
        f"{unit}.{p.name}": p
        for unit in range(spec.num_units)
        for p in spec.parameters(unit)
        if not p.decays and p.trainable
    }
    assert vectors
    for key, before in start.items():
        taken = base.learning_rate * base.weight_decay * before if key in vectors else 0 * before
        torch.testing.assert_close(without[key] - taken, with_[key], rtol=0, atol=1e-6)
        if key in vectors:
            assert not torch.equal(without[key], with_[key])
