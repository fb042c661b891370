from __future__ import annotations

import pytest
import torch

from tutti.nn.parallel.ring import ring_steps
from tutti.nn.parallel.rows import pieces_of


@pytest.mark.parametrize("ways", [2, 3, 4])
def test_a_sequence_over_ranks_is_one_run_of_keys_per_step(ways: int) -> None:
    """Early and late chunk of a rank see the same keys of the others, or one of them does."""
    length = 16 * ways
    pieces = [pieces_of((length,), (length,), ways, rank) for rank in range(ways)]
    seen = 0
    for rank in range(ways):
        steps = ring_steps(pieces, rank, torch.device("cpu"))
        for number, step in enumerate(steps):
            assert step.segments is not None
            assert len(step.segments) == 1
            assert step.segments.keys_follow
            causal = number == 0
            queries, keys = step.segments.queries[0], step.segments.keys[0]
            seen += queries * keys - (queries * (queries - 1) // 2 if causal else 0)
    assert seen == length * (length + 1) // 2
