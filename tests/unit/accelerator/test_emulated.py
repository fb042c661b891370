"""Emulated chips. Time never decides: what is waited for is checked, not how long it took."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from tutti.accelerator.devices import emulated
from tutti.accelerator.devices.emulated import EmulatedAccelerator, Overrun, wait_until
from tutti.errors import InputError


class Clock:
    """A clock that only sleeping and working move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.busy = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6  # spinning ends
        return self.now

    def thread_time(self) -> float:
        return self.busy

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def work(self, seconds: float, *, share: float = 1.0) -> None:
        """Work; others take the processor for the rest of the time."""
        self.now += seconds
        self.busy += seconds * share


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    fake = Clock()
    for name in ("perf_counter", "thread_time", "sleep"):
        monkeypatch.setattr(emulated.time, name, getattr(fake, name))
    yield fake
    monkeypatch.undo()


def test_declared_time(clock: Clock) -> None:
    chip = EmulatedAccelerator(chip="slow")
    with chip.paced(2.0):
        clock.work(0.5)
    assert clock.now == pytest.approx(102.0, abs=2e-3)
    assert chip.overrun.due_s == 2.0
    assert chip.overrun.late_s == 0.0
    assert chip.overrun.counts


def test_declared_time_that_the_host_cannot_keep(clock: Clock) -> None:
    chip = EmulatedAccelerator(chip="fast")
    with chip.paced(1.0):
        clock.work(1.25)
    assert chip.overrun.late_s == pytest.approx(0.25, abs=1e-3)
    assert chip.overrun.share == pytest.approx(0.25, abs=1e-3)
    assert not chip.overrun.counts
    for _ in range(10):
        with chip.paced(1.0):
            clock.work(0.1)
    assert chip.overrun.share == pytest.approx(0.25 / 11, abs=1e-3)
    assert chip.overrun.counts


def test_dilated_time_is_that_of_the_processor(clock: Clock) -> None:
    chip = EmulatedAccelerator(chip="slow", mode="dilated", factor=4.0)
    with chip.paced():
        clock.work(0.5)
    assert clock.now == pytest.approx(102.0, abs=2e-3)
    with chip.paced():
        clock.work(1.0, share=0.5)  # half of it belonged to somebody else
    assert clock.now == pytest.approx(104.0, abs=2e-3)
    assert chip.overrun.counts
    with chip.paced():
        clock.work(8.0, share=0.125)  # 1 s of work, due after 4, ended after 8
    assert chip.overrun.late_s == pytest.approx(4.0, abs=1e-3)
    assert not chip.overrun.counts


def test_an_error_inside_is_not_waited_for(clock: Clock) -> None:
    chip = EmulatedAccelerator(chip="slow")
    with pytest.raises(ZeroDivisionError), chip.paced(1000.0):
        _ = 1 / 0
    assert clock.now < 101.0
    assert chip.overrun.due_s == 0.0


def test_no_overrun_without_work() -> None:
    assert Overrun().share == 0.0
    assert Overrun().counts
    assert Overrun(due_s=1.0, late_s=0.05).counts
    assert not Overrun(due_s=1.0, late_s=0.051).counts


def test_waiting_for_the_real_clock() -> None:
    moment = time.perf_counter() + 2e-3
    assert wait_until(moment) == 0.0
    assert time.perf_counter() >= moment
    assert wait_until(moment - 1.0) > 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "dilated", "factor": 0.5}, "'factor' is 0.5; the host cannot be outrun"),
        ({"mode": "dilated", "factor": float("nan")}, "'factor' is nan"),
        ({"mode": "dilated", "factor": float("inf")}, "'factor' is inf"),
        ({"mode": "dilate"}, "'mode' is 'dilate'; did you mean 'dilated'?"),
        ({"memory_bytes": 0}, "'memory_bytes' is 0; give 1 or more"),
        ({"memory_bytes": -5}, "'memory_bytes' is -5; give 1 or more"),
    ],
)
def test_clumsy_input(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as error:
        EmulatedAccelerator(chip="odd", **options)  # type: ignore[arg-type]
    assert str(error.value).startswith("emulated chip 'odd': ")
    assert message in str(error.value)


def test_declared_time_that_is_no_time() -> None:
    chip = EmulatedAccelerator(chip="odd")
    for declared in (None, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="emulated chip 'odd'"), chip.paced(declared):
            pytest.fail("ran before it was refused")


def test_memory_is_limited_forward_and_backward() -> None:
    chip = EmulatedAccelerator(chip="small", memory_bytes=1 << 20)
    try:
        assert chip.memory().total == 1 << 20
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1 << 20)
        x = torch.ones(100_000, requires_grad=True)  # 0.4 of 1.05 MB
        y = x.exp()  # 0.8
        with pytest.raises(torch.OutOfMemoryError):
            y.sum().backward()  # its gradient does not fit
        del y
        (x[:10] * 2).sum().detach()
    finally:
        chip.limit_memory(None)


def test_a_real_chip_is_not_paced() -> None:
    from tutti.accelerator import open_accelerator

    with open_accelerator("cpu").paced(1e9):
        pass
