"""Four ranks in mixed arrangements: loss and all gradients are those of one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.support.models import (  # noqa: E402
    batch_of,
    make,
    spec_of,
    total_loss,
    whole_run,
    zero_gradients,
)
from tests.support.threads import ThreadLinks, World  # noqa: E402
from tutti.nn import Batch, Ranks  # noqa: E402
from tutti.plan.plan import ContextKind  # noqa: E402

LENGTHS = (16, 8, 16)  # eight equal chunks each
GATHER, RING = ContextKind.ALL_GATHER, ContextKind.RING


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Ranks count tensor-parallel ones fastest, then context-parallel ones, then replicas."""

    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    kind: ContextKind = GATHER
    expert_counts: tuple[int, ...] = ()

    def groups(self, rank: int) -> tuple[list[int], list[int]]:
        tensor = [rank - rank % self.tp + i for i in range(self.tp)]
        span = self.tp * self.cp
        context = [rank - rank % span + rank % self.tp + i * self.tp for i in range(self.cp)]
        return tensor, context

    @property
    def replicas(self) -> int:
        return 4 // (self.tp * self.cp)


CASES: dict[str, tuple[Arrangement, str]] = {
    "tp4, 2 kv heads": (Arrangement(tp=4), "dense"),
    "tp4+sp, 2 kv heads": (Arrangement(tp=4, sequence_parallel=True), "dense"),
    "tp4+sp, norm across heads": (Arrangement(tp=4, sequence_parallel=True), "qk-norm"),
    "cp4 gathered": (Arrangement(cp=4), "latent"),
    "cp4 ring": (Arrangement(cp=4, kind=RING), "latent"),
    "cp4 ring of experts": (Arrangement(cp=4, kind=RING), "experts"),
    "tp2 cp2": (Arrangement(tp=2, cp=2), "tied"),
    "tp2+sp cp2 ring": (Arrangement(tp=2, cp=2, sequence_parallel=True, kind=RING), "experts"),
    "tp2 dp2 ep4": (Arrangement(tp=2, expert_counts=(2, 0, 1, 2)), "experts"),
    "tp2+sp cp2 ep4": (
        Arrangement(tp=2, cp=2, sequence_parallel=True, expert_counts=(3, 1, 1, 1)),
        "latent",
    ),
    "tp4 ep4": (Arrangement(tp=4, expert_counts=(1, 2, 1, 1)), "expert-bias"),
}


def run_rank(links: ThreadLinks, arrangement: Arrangement, kind: str) -> Any:
    spec, rank = spec_of(kind), links.rank
    tensor, context = arrangement.groups(rank)
    parallel = Ranks(
        tensor=links.group(tensor),
        context=links.group(context),
        experts=links.group(range(4)) if arrangement.expert_counts else links.group([rank]),
        expert_counts=arrangement.expert_counts,
        sequence_parallel=arrangement.sequence_parallel,
    )
    model = make(spec, parallel=parallel, context_kind=arrangement.kind)
    out = model(None, own_batch(spec, arrangement, rank))
    total_loss(out).backward()
    tensors = [
        (
            x.name,
            x.slices,
            x.piece.partial,
            torch.zeros_like(x.view) if x.gradient is None else x.gradient,
        )
        for x in model.logical_tensors()
        if x.piece.parameter.trainable
    ]
    return float(out.loss.detach()), tensors


def own_batch(spec: Any, arrangement: Arrangement, rank: int) -> Batch:
    whole = batch_of(spec, LENGTHS)
    if arrangement.replicas == 2:  # the first has one sequence, the second the others
        cut = LENGTHS[0]
        own = slice(0, cut) if rank < 2 else slice(cut, None)
        lengths = LENGTHS[:1] if rank < 2 else LENGTHS[1:]
        assert whole.targets_t is not None
        whole = Batch.of(spec, whole.tokens_t[own], lengths, targets_t=whole.targets_t[own])
    index = rank // arrangement.tp % arrangement.cp
    return whole.share(spec, arrangement.cp, index)


@pytest.mark.parametrize("name", CASES)
def test_four_ranks_equal_one(name: str) -> None:
    arrangement, kind = CASES[name]
    spec = spec_of(kind)
    _, expected = whole_run(spec, lengths=LENGTHS)
    found = World(4).run(lambda links: run_rank(links, arrangement, kind))
    losses = [loss for loss, _ in found][:: arrangement.tp]
    alone = float(make(spec)(None, batch_of(spec, LENGTHS)).loss.detach())
    assert sum(losses) == pytest.approx(alone, rel=1e-12)
    zero = zero_gradients(spec)
    sums: dict[tuple[str, str], Any] = {}
    slices_of = {}
    for rank, (_, tensors) in enumerate(found):
        for tensor, slices, partial, gradient in tensors:
            key = (tensor, str(slices))
            first = all(
                str(slices) != str(other)
                for peer in range(rank - rank % arrangement.tp, rank)
                for same, other, _, _ in found[peer][1]
                if same == tensor
            )
            if partial or first:  # else an equal one was counted
                sums[key] = sums[key] + gradient if key in sums else gradient.clone()
                slices_of[key] = slices
    assert {tensor for tensor, _ in sums} == set(expected)
    for (tensor, text), gradient in sums.items():
        whole = expected[tensor]
        against = tensor.replace(".key.", ".query.") if tensor in zero else tensor
        error = float((gradient - whole[slices_of[tensor, text]]).norm())
        assert error <= 1e-10 * float(expected[against].norm()), (tensor, text)
