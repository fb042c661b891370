"""Optimizers that see whole tensors: who loses a peer before it knows the way has not moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.any_plan import PLANS
from tests.support.threads import World
from tests.support.training import batches_of, engine_of, in_fp32, settings
from tutti.comm.errors import CommError

PLAN = "experts over tensor and data parallel"  # each of its four ranks asks for 8 or 14 sums


class LosesAPeer:
    """Links that break when so many of the optimizer's own sums are done."""

    def __init__(self, links: Any, sums: int) -> None:
        self.links, self.left = links, sums

    def all_reduce(self, *words: Any) -> Any:
        if self.left == 0:
            raise CommError("rank 1 is lost", rank=self.links.rank)
        self.left -= 1
        return self.links.all_reduce(*words)


def state_of(engine: Any) -> list[torch.Tensor]:
    """Return copies of weights (what others keep as zeros), moments and means."""
    held = []
    for state in engine.parameters.all_states():
        optimizer = state.optimizer
        held += [one for one in (optimizer.mean, optimizer.square) if one is not None]
    held += [values.nan_to_num() for _, _, values in engine.weights()]
    for tensor in getattr(engine.directions, "tensors", ()):
        held += tensor.means.values()
    return [one.detach().clone() for one in held]


@pytest.mark.parametrize("sums", [0, 3, 7])
@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_a_step_that_lost_a_peer_on_the_way_is_undone(optimizer: str, sums: int) -> None:
    plan = in_fp32(PLANS[PLAN], optimizer)

    def one(links: Any) -> tuple[bool, bool, bool, int]:
        engine = engine_of(plan, plan.model.spec, links)
        engine.step(batches_of(engine, 0), settings())
        before = state_of(engine)
        right = engine.directions.set_directions
        broken = LosesAPeer(links, sums)
        engine.directions.set_directions = lambda _links, *words: right(broken, *words)
        with pytest.raises(CommError, match="is lost"):
            engine.step(batches_of(engine, 1), settings())
        same = all(map(torch.equal, before, state_of(engine)))
        return same, engine.end.decided, engine.end.pending, len(before)

    for same, decided, pending, tensors in World(plan.num_ranks).run(one):
        assert tensors > 10
        assert same
        # neither finishes the step alone, nor with sums that others heard
        assert not decided
        assert not pending
