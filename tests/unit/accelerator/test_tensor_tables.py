"""Tables say where tensors lie now, whoever had their addresses before."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tutti.accelerator.tensors.tensor_tables import MOST_KEPT, Table, TensorTables

PART = 8
COLUMNS = 3


def walked(tables: tuple[Table, ...], column: int, memory: Tensor) -> list[float]:
    """Return what programs of a kernel read through a column, in their order."""
    read = []
    start, width = memory.data_ptr(), memory.element_size()
    for table in tables:
        for row, run, part in table.parts.tolist():
            own = table.rows[row].tolist()
            length, step = own[COLUMNS], own[COLUMNS + 1 + column]
            first = (own[column] - start) // width + run * step
            inside = range(part * PART, min(length, (part + 1) * PART))
            read += [float(memory[first + place]) for place in inside]
    return sorted(read)


def test_each_element_is_read_once() -> None:
    memory = torch.arange(200.0)
    tensors = [memory[0:30], memory[32:96].view(4, 16)[:, :8], memory[100:101], memory[112:112]]
    tables = TensorTables(columns=COLUMNS, part=PART).of(tensors)
    assert tables is not None
    assert walked(tables, 0, memory) == sorted(x for t in tensors for x in t.flatten().tolist())


def test_the_same_tensors_have_the_same_tables() -> None:
    memory = torch.arange(200.0)
    kept = TensorTables(columns=COLUMNS, part=PART)
    first = kept.of([memory[:30]], [memory[100:130]])
    assert first is not None
    again = kept.of([memory[:30]], [memory[100:130]])  # other objects at the same places
    assert again is first
    assert kept.of([memory[100:130]], [memory[:30]]) is not first


shapes = st.sampled_from([(24,), (4, 6), (2, 3, 4), (3, 8)])


@given(st.lists(st.tuples(shapes, st.booleans()), min_size=2, max_size=6))
def test_another_tensor_at_an_address_is_told(drawn: list[tuple[tuple[int, ...], bool]]) -> None:
    memory = torch.arange(4.0 * 24).reshape(4, 24)
    flat = memory.view(-1)
    kept = TensorTables(columns=COLUMNS, part=PART)
    for shape, strided in drawn:
        size = int(torch.Size(shape).numel())
        tensor = memory[:, :6] if strided else flat[:size].view(shape)
        tables = kept.of([tensor])
        assert tables is not None
        assert walked(tables, 0, flat) == sorted(tensor.flatten().tolist())


def test_other_kinds_of_numbers_at_an_address_are_told() -> None:
    memory = torch.zeros(64)
    kept = TensorTables(columns=COLUMNS, part=PART)
    wide, narrow = kept.of([memory[:32]]), kept.of([memory.view(torch.bfloat16)[:32]])
    assert wide is not None
    assert narrow is not None
    assert (wide[0].alike.dtypes, narrow[0].alike.dtypes) == ((torch.float32,), (torch.bfloat16,))


def test_tensors_without_runs_have_no_table() -> None:
    irregular = torch.zeros(4, 6, 5).transpose(0, 2)
    kept = TensorTables(columns=COLUMNS, part=PART)
    assert kept.of([irregular]) is None
    assert kept.of([irregular]) is None  # from what is kept, too
    assert kept.of([]) == ()


def test_tables_do_not_pile_up_nor_hold_tensors() -> None:
    import weakref

    kept = TensorTables(columns=COLUMNS, part=PART)
    tensor = torch.zeros(16)
    seen = weakref.ref(tensor)
    kept.of([tensor])
    del tensor
    assert seen() is None
    held = torch.zeros(MOST_KEPT + 50)
    for i in range(MOST_KEPT + 50):
        kept.of([held[i : i + 1]])
    assert len(kept._kept) == MOST_KEPT
