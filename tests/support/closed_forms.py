"""Closed forms of step times, which the simulator is held against.

*1F1B with equal stages.* p stages, m micro-batches; every pass takes f (forward), g (input
gradient), w (weight gradient), every transfer c. Our lists send the input gradient before the
weight gradient is computed, so the way back costs g per stage, not g + w:

    T = m (f + g + w) + (p − 1)(f + g + 2c)        provided 2c ≤ w

No schedule is faster: the last stage cannot begin before (p − 1)(f + c), it computes m (f + g + w)
of which the last weight pass may be hidden, and its last gradient then travels back through p − 1
stages, the first of which closes with a weight pass. Our lists reach it: let stage s run

    g(s, j) at  (p − 1)(f + c) + f + j (f + g + w) + (p − 1 − s)(g + c)      w(s, j) right behind,
    f(s, j) right behind w(s, j − p + s), and at s (f + c) + j max(f, c) in the warm-up.

A stage's passes then touch each other; a gradient arrives just in time; a forward arrives
w − 2c ≥ 0 early; the last to end is w(0, m − 1), at T. With w merged into g (w = 0, c = 0) this is
the textbook's (m + p − 1)(f + b).
"""

from __future__ import annotations

from collections.abc import Sequence


def one_f_one_b_seconds(
    stages: int,
    micro_batches: int,
    *,
    forward: float,
    backward_input: float,
    backward_weight: float = 0.0,
    send: float = 0.0,
) -> float:
    """Return the exact step time of 1F1B over equal stages (see above)."""
    if 2 * send > backward_weight:
        raise ValueError(
            f"two transfers of {send:g} s do not hide behind a weight pass of {backward_weight:g} s"
        )
    work = forward + backward_input + backward_weight
    return micro_batches * work + (stages - 1) * (forward + backward_input + 2 * send)


def pipeline_lower_bound(
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    micro_batches: int,
    *,
    send: Sequence[float] = (),
    weights_at_once: bool = True,
) -> float:
    """Return a lower bound from per-stage seconds alone, before any list is written.

    `send[s]` is the transfer between stages s and s + 1. With `weights_at_once` (GPipe, 1F1B) a
    weight pass follows its input pass; without (zero bubble) all of them may come last.
    """
    wires = list(send) or [0.0] * (len(forward) - 1)
    bound = ahead = back = 0.0
    for s, (f, g, w) in enumerate(zip(forward, backward_input, backward_weight, strict=True)):
        weights = w * (micro_batches - 1) if weights_at_once else 0.0
        to_last_gradient = micro_batches * (f + g) + weights
        bound = max(
            bound,
            ahead + micro_batches * (f + g + w),
            ahead + to_last_gradient + back + backward_weight[0],
        )
        if s < len(wires):
            ahead += f + wires[s]
            back += g + wires[s]
    return bound
