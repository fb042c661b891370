"""Which addresses connections join, and in what order others are tried when one is lost."""

from __future__ import annotations

import pytest

from tutti.comm.transport.lanes import Ends


@pytest.mark.parametrize(("home", "away"), [(1, 1), (2, 2), (2, 3), (3, 1), (4, 4), (2, 4)])
def test_tries_reach_every_pair_of_nics(home: int, away: int) -> None:
    ends = Ends(tuple(f"h{n}" for n in range(home)), tuple(f"a{n}" for n in range(away)), 1)
    tried = {ends.other_pair(index) for index in range(home * away)}
    assert len(tried) == home * away


def test_connections_go_from_nic_to_nic_in_turn() -> None:
    ends = Ends(("h0", "h1"), ("a0", "a1"), 1)
    assert [ends.pair(index) for index in range(3)] == [("h0", "a0"), ("h1", "a1"), ("h0", "a0")]


def test_a_host_without_declared_addresses_binds_to_none() -> None:
    assert Ends((), ("a0",), 1).other_pair(3) == ("", "a0")
