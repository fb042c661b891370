"""However a model is spread over two ranks, loss and all gradients are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from tests.support.gloo import World, run_processes  # noqa: E402
from tests.support.models import (  # noqa: E402
    LENGTHS,
    batch_of,
    make,
    spec_of,
    total_loss,
    whole_run,
    zero_gradients,
)
from tutti.nn import Batch, Model, ParallelContext, Ranks  # noqa: E402
from tutti.plan.plan import ContextKind  # noqa: E402

TOLERANCE = 1e-9  # relative, in float64

TENSOR = ["dense", "one-kv-head", "qk-norm", "tied", "alibi", "positions", "latent", "experts"]
TENSOR += ["expert-bias"]
CASES: list[tuple[str, str]] = [
    *(("tp", kind) for kind in TENSOR),
    *(("tp+sp", kind) for kind in TENSOR),
    *(("cp", kind) for kind in ("dense", "tied", "alibi", "positions", "latent", "experts")),
    *(("ep", kind) for kind in ("latent", "experts", "expert-bias")),
    *(("tp+ep", kind) for kind in ("latent", "experts", "expert-bias")),
    *(("tp+sp+ep", kind) for kind in ("latent", "experts", "expert-bias")),
    ("tp", "prediction"),
    ("tp+sp", "prediction"),
    ("cp", "prediction"),
    *(("ring", kind) for kind in ("dense", "latent", "experts", "tied")),
]


def context(how: str, num_experts: int) -> ParallelContext:
    world, parts = World(), how.split("+")
    unequal = (num_experts - 2, 2)
    options: dict[str, Any] = {}
    if "tp" in parts:
        options["tensor"] = world
    if "cp" in parts or "ring" in parts:
        options["context"] = world
    if "ep" in parts:
        options.update(experts=world, expert_counts=unequal)
    return Ranks(**options, sequence_parallel="sp" in parts)


def spec_for(kind: str) -> Any:
    return spec_of("latent", prediction_heads=2) if kind == "prediction" else spec_of(kind)


def lengths_of(how: str) -> tuple[int, ...]:
    return (12, 8, 20) if how == "ring" else LENGTHS


def own_batch(how: str, spec: Any, rank: int) -> Batch:
    whole = batch_of(spec, lengths_of(how))
    if how in ("cp", "ring"):
        return whole.share(spec, 2, rank)
    if how == "ep":  # each rank has sequences of its own
        cut = LENGTHS[0] + LENGTHS[1]
        own, lengths = (
            (slice(0, cut), LENGTHS[:2]) if rank == 0 else (slice(cut, None), LENGTHS[2:])
        )
        assert whole.targets_t is not None
        return Batch.of(spec, whole.tokens_t[own], lengths, targets_t=whole.targets_t[own])
    return whole


def gathered(model: Model, how: str) -> dict[str, Any]:
    """Return this rank's gradients after what an engine would add up."""
    mine = {
        logical.name: (
            logical.slices,
            logical.piece.partial,
            torch.zeros_like(logical.view) if logical.gradient is None else logical.gradient,
        )
        for logical in model.logical_tensors()
        if logical.piece.parameter.trainable
    }
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    found = {}
    for name, (slices, partial, gradient) in mine.items():
        if partial or "tp" not in how.split("+"):
            parts = [theirs[name][2] for theirs in everybody if theirs[name][0] == slices]
            gradient = torch.stack(parts).sum(0)
        found[name] = (slices, gradient)
    return found


def one_case(how: str, kind: str, rank: int) -> tuple[float, dict[str, float]]:
    """Return the relative errors of the loss and of each gradient on this rank."""
    spec = spec_for(kind)
    parallel = context(how, spec.num_experts)
    expected_loss, expected = whole_run(spec, lengths=lengths_of(how))
    kind_of = ContextKind.RING if how == "ring" else ContextKind.ALL_GATHER
    model = make(spec, parallel=parallel, context_kind=kind_of)
    batch = own_batch(how, spec, rank)
    out = model(None, batch)
    total_loss(out).backward()
    shared = how in ("cp", "ring", "ep")  # ranks have tokens of their own
    value = out._replace(balance=None)
    loss = total_loss(value).detach().clone()
    balance = torch.zeros_like(loss) if out.balance is None else out.balance.detach().clone()
    if shared:
        dist.all_reduce(loss)
    if how != "tp":
        dist.all_reduce(balance)
    errors = {}
    for name, (slices, gradient) in gathered(model, how).items():
        whole = expected[name]
        against = name.replace(".key.", ".query.") if name in zero_gradients(spec) else name
        scale = float(expected[against].norm())
        errors[name] = float((gradient - whole[slices]).norm()) / (scale or 1.0)
    return abs(float(loss + balance) - expected_loss) / abs(expected_loss), errors


def worker(rank: int) -> dict[tuple[str, str], Any]:
    return {(how, kind): one_case(how, kind, rank) for how, kind in CASES}


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """All cases in one start of two processes, which takes longer than the cases."""
    results = run_processes(worker, 2, tmp_path)
    wrong = []
    for rank, found in enumerate(results):
        assert list(found) == CASES
        for (how, kind), (loss, gradients) in found.items():
            assert len(gradients) >= 20
            worst = max(gradients, key=lambda name: gradients[name])
            if not (loss <= TOLERANCE and gradients[worst] <= TOLERANCE):
                wrong.append(
                    f"{how} {kind}, rank {rank}: {loss:.1e}, {worst} {gradients[worst]:.1e}"
                )
    assert not wrong, "\n".join(wrong)
