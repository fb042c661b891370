"""From rewards to advantages: how much better an answer is than others to the same prompt. Pure.

GRPO: (r − mean of the group) ÷ (its deviation + 1e-4). RLOO: r less the mean of the *other* answers
of the group, where the divergence from the reference has been taken off the rewards.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SMALLEST_DEVIATION = 1e-4

Values = NDArray[np.float64]


def group_advantages(rewards_pg: Values, *, normalise: bool) -> Values:
    """Return GRPO's advantages of groups (a row each)."""
    ahead: Values = rewards_pg - rewards_pg.mean(1, keepdims=True)
    if not normalise:
        return ahead
    advantages: Values = ahead / (rewards_pg.std(1, ddof=1, keepdims=True) + SMALLEST_DEVIATION)
    return advantages


def left_out_advantages(rewards_pg: Values, divergence_pg: Values, beta: float) -> Values:
    """Return RLOO's advantages of groups: each answer against the mean of the others."""
    net = rewards_pg - beta * divergence_pg
    others = (net.sum(1, keepdims=True) - net) / (net.shape[1] - 1)
    advantages: Values = net - others
    return advantages
