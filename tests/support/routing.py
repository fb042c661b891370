"""Which experts each token of a training went to, however the tokens were spread over ranks.

A token is known by step, layer, sequence and position. Beside its experts stands its margin: by how
much the last chosen expert was ahead of the first that was not. Another order of additions may
change the choice only where the margin is nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tutti.nn.batch import Batch
from tutti.nn.experts import Experts
from tutti.nn.parallel.groups import shares

Token = tuple[int, int, int, int]  # step, unit, sequence of the step, position
Routing = dict[Token, tuple[tuple[int, ...], float]]
NEAR = 1e-4  # of logits of the order of one


class RoutingWatcher:
    """Notes the choices of every layer of experts among some units."""

    def __init__(self, units: Mapping[int, Any], tensor_rank: int, routing: Routing) -> None:
        self._tensor_rank, self._routing = tensor_rank, routing
        self._batches: dict[int, tuple[Batch, int, int]] = {}
        self._now: Batch | None = None
        for unit, module in units.items():
            for part in module.modules():
                if isinstance(part, Experts):
                    self._watch(unit, part)

    def expect(self, batch: Batch, step: int, first: int) -> None:
        """Say of which step a batch is, and which sequence of the step is its first."""
        self._batches[id(batch)] = (batch, step, first)

    def _watch(self, unit: int, layer: Experts) -> None:
        def enter(_: Any, args: tuple[Any, ...]) -> None:
            self._now = args[1]

        def routed(_: Any, __: Any, logits: Tensor) -> None:
            assert self._now is not None
            self._note(unit, layer, logits.detach(), self._now)

        layer.register_forward_pre_hook(enter)
        layer.router.register_forward_hook(routed)

    def _note(self, unit: int, layer: Experts, logits: Tensor, batch: Batch) -> None:
        _, step, first = self._batches[id(batch)]
        top = layer.spec.experts_per_token
        chosen = layer.operators.route(logits, layer.spec.router, top, layer.router.correction)
        ahead = logits.float().topk(top + 1).values
        margins = (ahead[:, top - 1] - ahead[:, top]).tolist()
        begin = 0
        if len(logits) != batch.num_tokens:  # tensor-parallel ranks route a share each
            ways = layer.parallel.tensor.size
            begin = sum(shares(batch.num_tokens, ways)[: self._tensor_rank])
        rows = slice(begin, begin + len(logits))
        places = torch.stack([batch.sequence_t[rows] + first, batch.positions_t[rows]], 1).tolist()
        for (sequence, position), experts, margin in zip(
            places, chosen.experts.tolist(), margins, strict=True
        ):
            key = (step, unit, sequence, position)
            self._routing[key] = (tuple(sorted(experts)), margin)


def rerouted(found: Routing, expected: Routing) -> dict[Token, float]:
    """Return the margins of the tokens that went elsewhere; raise if a token is missing."""
    assert found.keys() == expected.keys(), "not the same tokens were routed"
    return {
        token: expected[token][1] for token, (experts, _) in found.items()
        if experts != expected[token][0]
    }  # fmt: skip
