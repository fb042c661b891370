"""Parameters in 8 bits at level 3: what comes is multiplied as if it had come in bf16."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.any_plan import Draft, level
from tests.support.threads import ThreadLinks
from tests.support.training import in_precision, train_threads
from tutti.accelerator.reference.narrow import narrowed
from tutti.ownership.ownership import Block
from tutti.plan.job import ScheduleKind
from tutti.train.sync.narrow_gather import NarrowGather


def block(name: str, *shape: int) -> Block:
    return Block(1, name, tuple((0, size) for size in shape))


@given(
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    rows=st.integers(1, 6),
    cuts=st.lists(st.floats(0, 1), max_size=3),
    data=st.data(),
)
def test_whole_rows_are_multiplied_as_they_were(
    widths: list[int], rows: int, cuts: list[float], data: st.DataObject
) -> None:
    blocks = [block(str(i), rows, width) for i, width in enumerate(widths)]
    narrow = [data.draw(st.booleans()) for _ in blocks]
    size = sum(b.size for b in blocks)
    bounds = [0, *sorted(round(cut * size) for cut in cuts), size]
    generator = torch.Generator().manual_seed(size)
    flat = torch.randn(size, generator=generator)
    flat = (flat * torch.exp2(torch.randint(-20, 20, (size,), generator=generator))).bfloat16()
    gather = NarrowGather(blocks, narrow, bounds)
    messages = [
        gather.write(i, flat[low:high]) for i, (low, high) in enumerate(itertools.pairwise(bounds))
    ]
    assert tuple(map(len, messages)) == gather.counts
    found = torch.full_like(flat, float("nan"))
    gather.read(torch.cat(messages), found)
    offset = 0
    for own, is_narrow in zip(blocks, narrow, strict=True):
        stop = offset + own.size
        before, after = (x[offset:stop].view(own.shape) for x in (flat, found))
        if not is_narrow:
            assert torch.equal(after, before)
        for row in range(rows if is_narrow else 0):
            start = offset + row * own.shape[1]
            if any(start < bound < start + own.shape[1] for bound in bounds):
                continue  # a border cuts it
            assert torch.equal(wide(after[row]), wide(before[row]))
        offset = stop


def wide(row: Tensor) -> Tensor:
    return narrowed(row.unsqueeze(0)).wide(torch.float32)


def test_what_is_not_a_number_stays_so() -> None:
    flat = torch.randn(32).bfloat16()
    flat[3] = float("inf")
    gather = NarrowGather([block("w", 2, 16)], [True], [0, 32])
    found = torch.empty_like(flat)
    gather.read(gather.write(0, flat), found)
    assert found[:16].isnan().all()
    assert found[16:].isfinite().all()


@pytest.mark.parametrize("experts", [False, True])
def test_training_is_that_of_parameters_in_bf16(
    experts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = Draft(experts_in=(1,) if experts else ())
    plan = draft.line((((0, 4),), [{"count": 2}])).plan(ScheduleKind.ONE_F_ONE_B, level(3))
    plan = in_precision(plan, "fp8")
    spec = plan.model.spec
    assert spec is not None
    moved: list[Tensor] = []
    gather = ThreadLinks.all_gather

    def counted(self: ThreadLinks, ranks, x: Tensor, counts, out):  # type: ignore[no-untyped-def]
        moved.append(x)
        return gather(self, ranks, x, counts, out)

    monkeypatch.setattr(ThreadLinks, "all_gather", counted)
    found = train_threads(plan, spec)
    narrow = sum(x.numel() * x.element_size() for x in moved)
    assert any(x.dtype == torch.uint8 for x in moved)
    moved.clear()
    monkeypatch.setattr(
        "tutti.train.sync.synchronise.Synchronised._narrow_gather", lambda self, state: None
    )
    expected = train_threads(plan, spec)
    assert not any(x.dtype == torch.uint8 for x in moved)
    assert narrow < 0.75 * sum(x.numel() * x.element_size() for x in moved)
    assert found.losses == pytest.approx(expected.losses, rel=2**-8)
