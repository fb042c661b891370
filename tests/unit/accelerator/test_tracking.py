"""The memory tracker counts storages, not tensors, and lets go of them when torch does."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tutti.accelerator import DeviceMemoryError
from tutti.accelerator.devices.cpu import CpuAccelerator
from tutti.accelerator.devices.tracking import MemoryTracker

KIB = 1024


@pytest.fixture
def tracker() -> Iterator[MemoryTracker]:
    with MemoryTracker(64 * KIB) as active:
        yield active


def kibibytes(count: int) -> torch.Tensor:
    return torch.zeros(count * KIB // 4)


def test_what_is_made_counts_until_it_is_gone(tracker: MemoryTracker) -> None:
    held = kibibytes(4)
    assert tracker.allocated == 4 * KIB
    more = held + 1
    assert tracker.allocated == 8 * KIB
    del held, more
    assert tracker.allocated == 0
    assert tracker.peak == 8 * KIB


def test_views_count_once_and_keep_their_storage(tracker: MemoryTracker) -> None:
    held = kibibytes(4)
    view = held[:10].reshape(2, 5).t()
    assert tracker.allocated == 4 * KIB
    del held
    gc.collect()
    assert tracker.allocated == 4 * KIB
    assert view.sum() == 0
    del view
    assert tracker.allocated == 0


def test_in_place_counts_nothing_new(tracker: MemoryTracker) -> None:
    held = kibibytes(4)
    held.add_(1).mul_(2)
    held[1:3] = 7
    assert tracker.allocated == 4 * KIB
    assert tracker.peak <= 4 * KIB + 64  # a scalar on the way


def test_what_autograd_keeps_counts(tracker: MemoryTracker) -> None:
    x = kibibytes(4).requires_grad_()
    y = (x.exp() * 2).sum()  # exp keeps its result for backward, though no name holds it
    assert tracker.allocated >= 8 * KIB
    y.backward()
    assert x.grad is not None
    del y
    assert 8 * KIB <= tracker.allocated < 9 * KIB  # x and its gradient


def test_beyond_the_limit(tracker: MemoryTracker) -> None:
    held = kibibytes(60)
    with pytest.raises(DeviceMemoryError) as error:
        kibibytes(8)
    assert isinstance(error.value, torch.OutOfMemoryError)
    assert "8.0 KiB more than the 60.0 KiB in use would pass the limit of 64.0 KiB" in str(
        error.value
    )
    gc.collect()
    assert tracker.allocated == 60 * KIB, "what was refused must not count"
    del held
    kibibytes(8)


def test_a_small_model_trains_and_leaves_nothing(tracker: MemoryTracker) -> None:
    def step() -> None:
        layer = torch.nn.Linear(16, 16)
        layer(torch.ones(4, 16)).relu().sum().backward()

    step()
    gc.collect()
    assert tracker.allocated == 0
    peak = tracker.peak
    for _ in range(3):
        step()
    gc.collect()
    assert tracker.allocated == 0
    assert tracker.peak == peak


def test_the_cpu_counts_under_a_limit() -> None:
    accelerator = CpuAccelerator()
    assert accelerator.memory().allocated > 1 << 20  # the process
    accelerator.limit_memory(1 << 20)
    try:
        held = torch.zeros(1 << 16)
        assert accelerator.memory().allocated == 1 << 18
        accelerator.limit_memory(1 << 21)  # another limit goes on counting
        assert accelerator.memory().allocated == 1 << 18
        assert accelerator.memory().total == 1 << 21
        del held
        assert accelerator.memory().peak == 1 << 18
        accelerator.reset_peak()
        assert accelerator.memory().peak == 0
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1 << 20)
    finally:
        accelerator.limit_memory(None)
    torch.zeros(1 << 20)
    accelerator.limit_memory(None)  # lifting what is not set does nothing
