from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.topology import Position
from tutti.plan.chips import ChipRange, ChipSet

ids = st.lists(
    st.builds(Position, st.sampled_from(["a", "b"]), st.integers(0, 5), st.integers(0, 7)),
    unique=True,
    max_size=40,
)


@given(ids)
def test_collecting_single_chips_keeps_order_and_members(chips):
    collected = ChipSet.from_ids(chips)
    assert list(collected) == chips
    assert len(collected) == len(chips)
    assert [collected.at(i) for i in range(len(chips))] == chips


@given(ids)
def test_written_form_reads_back(chips):
    collected = ChipSet.from_ids(chips)
    assert ChipSet.from_document(collected.to_document(), Place("x")) == collected


@given(ids, st.integers(0, 45), st.integers(0, 45))
def test_cut_equals_a_list_slice(chips, start, stop):
    assert list(ChipSet.from_ids(chips).cut(start, stop)) == chips[start:stop]


def test_whole_nodes_become_one_rectangle():
    chips = [Position("a800", node, slot) for node in range(64) for slot in range(8)]
    assert ChipSet.from_ids(chips).to_document() == "a800/0-63/0-7"


def test_index_behind_the_end():
    with pytest.raises(IndexError):
        ChipSet.of("a/0/0-3").at(4)


@pytest.mark.parametrize(
    "text", ["a800", "a800/0", "a800/x/0", "a800/3-1/0", "a800/0/7-0", "/0/0", "a/0/0-", "a/-1/0"]
)
def test_malformed_ranges_name_the_remedy(text):
    with pytest.raises(ValueError, match=r"write chips as|from the smaller"):
        ChipRange.parse(text)


@pytest.mark.parametrize("value", [3, None, {"a": 1}, [1], ["a/0/0", 2], "nonsense"])
def test_documents_that_are_no_chips(value):
    with pytest.raises(InputError, match=r"^x\.json: 'chips' is"):
        ChipSet.from_document(value, Place("x.json", ("chips",)))
