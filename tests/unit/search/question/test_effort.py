"""How much work a search may do: more where more can be won, none where nothing can."""

from __future__ import annotations

import pytest

from tutti.search.question.effort import Effort


@pytest.mark.parametrize("seconds", [1.0 - 1e-12, 1.0])
def test_a_step_at_its_bound_earns_no_local_search(seconds: float) -> None:
    """Rounding may put a step a little below what bounds it."""
    assert Effort().local_search(8, seconds, 1.0) == 0


def test_a_wider_gap_earns_more_up_to_a_limit() -> None:
    effort = Effort()
    earned = [effort.local_search(8, seconds, 1.0) for seconds in (1.1, 1.2, 1.3, 9.0, 99.0)]
    assert earned == sorted(earned)
    assert earned[1] == pytest.approx(effort.last_mile, abs=1)
    assert earned[-1] == earned[-2] == int(effort.last_mile * effort.widest_more)
