"""Whether a process is a rank of a job that a launcher started."""

from __future__ import annotations

import pytest

from tutti.errors import InputError
from tutti.ranks.launcher_variables import VARIABLES, started_as_rank

FULL = dict.fromkeys(VARIABLES, "1")


def test_all_variables_make_a_rank() -> None:
    assert started_as_rank(FULL) is True
    assert started_as_rank({}) is False


def test_leftovers_do_not() -> None:
    assert started_as_rank({"WORLD_SIZE": "8", "MASTER_PORT": "29500"}) is False


def test_a_rank_that_cannot_meet_the_others_is_refused() -> None:
    with pytest.raises(InputError, match="RANK is set, but not MASTER_ADDR, MASTER_PORT; start"):
        started_as_rank({"RANK": "3", "WORLD_SIZE": "8"})
