"""All weights of a rank in one call of the optimizer, where the host is what a step waits for.

The Plan updates bucket by bucket. Where nothing of a bucket comes from anywhere or goes anywhere,
buckets are independent of each other, and a call for all of them issues two kernels, not two for
each. Element by element the arithmetic is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tutti.accelerator.operators import Operators
from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.train.state.state import SpanState
from tutti.train.state.weight_decay import by_settings

Lists = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


def is_plain(state: SpanState) -> bool:
    """Tell whether an update is AdamW's of what lies on the device, and nothing else."""
    optimizer = state.optimizer
    elsewhere = optimizer.homes or state.home is not None or state.host_sum is not None
    directed = state.direction is not None or state.directed is not None
    shaped = state.rule != "adamw" or directed or optimizer.average is not None
    return not (elsewhere or shaped or state.span.copied)


def waiting(states: Iterable[SpanState]) -> list[SpanState]:
    """Return the states with gradients whose updates are plain: one call moves them all."""
    return [state for state in states if state.has_gradients and is_plain(state)]


def update_jointly(
    states: Sequence[SpanState],
    operators: Operators,
    *,
    number: int,
    settings: AdamSettings,
    factor: Tensor,
) -> None:
    """Move the weights of states whose updates are plain."""
    calls: dict[tuple[AdamSettings, bool, tuple[torch.dtype, ...]], Lists] = {}
    for state in states:
        by_block = state.level == 0
        gradients = state.step_gradients(by_block=by_block)
        moments = [state.kept_vector(name, by_block) for name in ("mean", "square")]
        master = state.kept_vector("master", by_block)
        copies = state.views if master is not None and by_block else None
        lists = [master or state.views, gradients, *moments, copies]
        kept = None if by_block else state.kept
        for own, _, parts in by_settings(lists, state.span.blocks, kept, settings):
            dtypes = tuple(part[0].dtype for part in parts if part)
            call = calls.setdefault((own, parts[-1] is None, dtypes), ([], [], [], [], []))
            for joined, part in zip(call, parts, strict=True):
                joined.extend(part or ())
    for (own, _, _), (weights, gradients, means, squares, copies) in calls.items():
        operators.adamw(
            weights, gradients, means, squares, step=number, settings=own,
            gradient_factor=factor, copies=copies or None,
        )  # fmt: skip
    for state in states:
        state.forget_gradients()
