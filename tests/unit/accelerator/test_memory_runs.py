"""Tensors are walked in runs of memory: every element once, in its order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tutti.accelerator.tensors.memory_runs import Runs, common_runs

STORED = torch.arange(4 * 6 * 5).reshape(4, 6, 5)


def walked(tensor: Tensor, runs: Runs, which: int) -> list[int]:
    """Return a tensor's elements as a kernel reads them: by address."""
    flat = torch.as_strided(STORED, (STORED.numel(),), (1,))
    first, step = tensor.storage_offset(), runs.steps[which]
    return [
        int(flat[first + run * step + place])
        for run in range(runs.number)
        for place in range(runs.length)
    ]


@pytest.mark.parametrize(
    "part",
    [
        STORED,
        STORED[:, :3],  # the gates of four experts
        STORED[:, 3:],
        STORED[1:3],
        STORED[:, :, 1:3],
        STORED[2],
        STORED[:1, :3],
        STORED[:, 2:3, :],
        STORED.reshape(2, 2, 6, 5)[:, :, 1:4],
    ],
)
def test_every_element_in_its_order(part: Tensor) -> None:
    beside = torch.empty_like(part, memory_format=torch.contiguous_format)
    runs = common_runs((beside, part))
    assert runs is not None
    assert runs.number * runs.length == part.numel()
    assert walked(part, runs, 1) == part.flatten().tolist()
    assert runs.steps[0] == runs.length


@pytest.mark.parametrize(
    "group",
    [
        (STORED.transpose(1, 2),),
        (STORED[:, :3], STORED[:, :3, :5].transpose(0, 1)),
        (STORED[:, :3], torch.empty(4, 3, 5).transpose(0, 1)),
        (STORED[:2], STORED[:3]),
        (STORED[:1].expand(4, 6, 5),),
        (STORED[::2, :3], STORED[:2, :, :3].transpose(1, 2).reshape(2, 3, 6)[:, :, :5]),
        (torch.empty(70_000, 4)[:, :2],),  # more runs than a grid takes
    ],
)
def test_what_has_no_common_runs(group: tuple[Tensor, ...]) -> None:
    assert common_runs(group) is None


def test_nothing_is_no_run() -> None:
    assert common_runs((torch.empty(0), torch.empty(0, 3))) == Runs(1, 0, (0, 0))
