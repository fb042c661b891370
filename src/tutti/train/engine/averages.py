"""The mean of the weights of many steps, in their place for a while: what is evaluated with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tutti.train.engine.engine import Engine
from tutti.train.state.state import SpanState


@contextmanager
def averaged(engine: Engine) -> Iterator[None]:
    """Let an engine compute with the mean of its weights, if it keeps one; then as before."""
    states = [s for s in engine.parameters.all_states() if s.optimizer.average is not None]
    kept = [state.read_kept(0, state.num_kept).clone() for state in states]
    try:
        for state in states:
            average = state.optimizer.average
            assert average is not None
            _put(state, average)
        yield
    finally:
        for state, weights in zip(states, kept, strict=True):
            _put(state, weights)


@torch.no_grad()
def _put(state: SpanState, weights: Tensor) -> None:
    master = state.optimizer.master
    if master is None:
        state.write_parameters(state.kept.start, weights.to(state.views[0].dtype))
        return
    state.optimizer.settle()
    master.copy_(weights)
    state.follow_master()
