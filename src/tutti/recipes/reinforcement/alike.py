"""Groups whose answers are all judged alike: no answer is better than another, nothing is learnt.

It is said at the first batch in which every group is so, and again as such batches go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tutti.recipes.reinforcement.advantages import Values

ROUNDING = 1e-9  # of the largest reward, or of one
SAID_AT = (1, 3, 10, 30, 100, 300, 1000)  # batches in a row


def share_alike(rewards_pg: Values) -> float:
    """Return the share of groups (a row each) with one reward for all answers; NaN of none."""
    if not len(rewards_pg):
        return float("nan")
    scale = np.maximum(1.0, np.abs(rewards_pg).max(1))
    return float(np.mean(np.ptp(rewards_pg, axis=1) <= ROUNDING * scale))


class Alike:
    """How many batches in a row had nothing to tell answers apart."""

    def __init__(self) -> None:
        self._batches = 0

    def noted(self, share: float, rewards: Sequence[float], samples: str) -> str:
        """Count a batch; return what a person should know, which is mostly nothing.

        `share` is that of its equal groups, `samples` where the answers are.
        """
        if np.isnan(share):  # every group is left out, each with a line of its own
            return ""
        self._batches = self._batches + 1 if share == 1.0 else 0
        if self._batches not in SAID_AT:
            return ""
        low, high = min(rewards), max(rewards)
        given = f"{low:g}" if low == high else f"{low:g} to {high:g}, one for each prompt"
        when = "in this batch" if self._batches == 1 else f"for {self._batches} batches in a row"
        return (
            f"rewards: {when} all answers to a prompt were worth the same ({given}), so nothing "
            f"is learnt from them; look at {samples}, and at what the rewards ask for: partial "
            "credit, easier prompts or a larger sampling.group tell answers apart"
        )
