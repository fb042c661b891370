"""Checks of the device itself: memory and its limit, streams, random numbers, copies, graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator
from tutti.accelerator.conformance.report import DEVICE, Outcome, Verdict
from tutti.units import bytes_text

MIB = 1 << 20
LIMIT = 64 * MIB
TOO_MUCH = 256 * MIB


def outcome(check: str, verdict: Verdict, detail: str = "") -> Outcome:
    """Return an outcome of the device."""
    return Outcome(subject=DEVICE, check=check, verdict=verdict, detail=detail)


class Unsupported(Exception):  # noqa: N818  (an answer, not an error)
    """The device says that it does not have this."""


def check(accelerator: Accelerator) -> Iterator[Outcome]:
    """Yield one outcome per check."""
    for name, function in CHECKS.items():
        yield checked(name, lambda function=function: function(accelerator))  # type: ignore[misc]


def checked(name: str, function: Callable[[], str | None]) -> Outcome:
    """Run a check, which returns what is wrong, and turn however it ends into an outcome."""
    try:
        wrong = function()
    except Unsupported as reason:
        return outcome(name, Verdict.UNSUPPORTED, str(reason))
    except Exception as error:  # a vendor's plug-in may fail in any way; each is an answer here
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return outcome(name, Verdict.FAILED, text)
    return outcome(name, Verdict.FAILED if wrong else Verdict.PASSED, wrong or "")


# --- memory ----------------------------------------------------------------------------------


def _limit_beyond_use(accelerator: Accelerator, num_bytes: int) -> None:
    """Leave room for `num_bytes` more than is in use."""
    accelerator.empty_cache()
    # some devices count only while a limit is set
    accelerator.limit_memory(accelerator.memory().total)
    accelerator.limit_memory(accelerator.memory().allocated + num_bytes)


def _memory_counted(accelerator: Accelerator) -> str | None:
    """Memory in use and its peak follow what is allocated."""
    _limit_beyond_use(accelerator, TOO_MUCH)
    try:
        before = accelerator.memory()
        accelerator.reset_peak()
        held = torch.zeros(LIMIT // 4, dtype=torch.float32, device=accelerator.device)
        during = accelerator.memory()
        del held
        after = accelerator.memory()
    finally:
        accelerator.limit_memory(None)
    if during.allocated - before.allocated < LIMIT:
        grown = bytes_text(during.allocated - before.allocated)
        return f"{bytes_text(LIMIT)} were allocated, memory in use grew by {grown}"
    if after.allocated >= during.allocated:
        return f"{bytes_text(LIMIT)} were freed, memory in use stayed {bytes_text(after.allocated)}"
    if after.peak < during.allocated:
        return f"the peak is {bytes_text(after.peak)}, below {bytes_text(during.allocated)} in use"
    return None


def _memory_limited(accelerator: Accelerator) -> str | None:
    """An allocation beyond the limit fails, one below it and one after lifting it do not."""

    def allocate(num_bytes: int) -> None:
        torch.zeros(num_bytes, dtype=torch.uint8, device=accelerator.device)

    _limit_beyond_use(accelerator, LIMIT)
    try:
        allocate(LIMIT // 4)
        try:
            allocate(TOO_MUCH)
        except torch.OutOfMemoryError:
            pass
        else:
            return f"{bytes_text(TOO_MUCH)} were given under a limit of {bytes_text(LIMIT)}"
        allocate(LIMIT // 4)
    finally:
        accelerator.limit_memory(None)
    allocate(TOO_MUCH)
    return None


def _memory_limited_backward(accelerator: Accelerator) -> str | None:
    """The limit holds for what backward allocates, too."""
    x = torch.ones(64, device=accelerator.device, requires_grad=True)
    loss = _Greedy.apply(x, TOO_MUCH)
    _limit_beyond_use(accelerator, LIMIT)
    try:
        loss.backward()
    except torch.OutOfMemoryError:
        return None
    finally:
        accelerator.limit_memory(None)
    return f"backward was given {bytes_text(TOO_MUCH)} under a limit of {bytes_text(LIMIT)}"


class _Greedy(torch.autograd.Function):
    """A sum whose backward holds many bytes for a moment."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_bytes: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.num_bytes = num_bytes
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        torch.zeros(ctx.num_bytes, dtype=torch.uint8, device=x.device)
        return gradients[0].expand_as(x), None


# --- streams ---------------------------------------------------------------------------------


def _lanes_ordered(accelerator: Accelerator) -> str | None:
    """Events order the work of lanes: each step needs what the lane before made."""
    x = accelerator.to_device(torch.full((512, 512), 1.0))
    for round_ in range(8):
        value = float(round_ + 1)
        with accelerator.lane("compute"):
            work = x
            for _ in range(4):  # keeps the lane busy, so that a missing wait is seen
                work = (work @ x) / 512
            made = work * value
            first = accelerator.event()
            first.record()
        with accelerator.lane("copy"):
            first.wait()
            copied = made + 1.0
            second = accelerator.event()
            second.record()
        with accelerator.lane("network"):
            second.wait()
            sent = copied * 2.0
            third = accelerator.event()
            third.record()
        third.wait()
        result = sent - 1.0
        accelerator.synchronize()
        wanted = 2 * (value + 1) - 1
        if not bool((result.cpu() == wanted).all()):
            return f"round {round_}: {float(result.cpu().flatten()[0]):g}, expected {wanted:g}"
    return None


def _time_measured(accelerator: Accelerator) -> str | None:
    """Events tell how long work took: no less than nothing, no more than the host saw."""
    x = accelerator.to_device(torch.ones(512, 512))
    accelerator.synchronize()
    started = time.perf_counter()
    marks = [accelerator.event(timed=True) for _ in range(3)]
    for mark in marks:
        mark.record()
        for _ in range(8):
            x = (x @ x) / 512
    accelerator.synchronize()
    host_s = time.perf_counter() - started
    marks[-1].synchronize()
    parts = [marks[1].seconds_since(marks[0]), marks[2].seconds_since(marks[1])]
    whole = marks[2].seconds_since(marks[0])
    if min(parts) <= 0:
        return f"{min(parts):g} s between two events with work between them"
    if whole > host_s + 1e-3:
        return f"{whole:g} s between two events, of {host_s:g} s on the host"
    if abs(sum(parts) - whole) > 1e-4 + 0.01 * whole:
        return f"{parts[0]:g} s and {parts[1]:g} s do not add up to {whole:g} s"
    return None


# --- random numbers, copies, graphs ----------------------------------------------------------


def _random_restored(accelerator: Accelerator) -> str | None:
    """The same state gives the same numbers; a seed gives the same numbers again."""

    def draw() -> Tensor:
        return torch.rand(257, device=accelerator.device).cpu()

    kept = accelerator.random_state()
    try:
        accelerator.seed(7)
        state = accelerator.random_state()
        first, second = draw(), draw()
        accelerator.restore_random_state(state)
        if not torch.equal(draw(), first):
            return "a restored state gives other numbers"
        accelerator.seed(7)
        if not torch.equal(draw(), first):
            return "the same seed gives other numbers"
        if torch.equal(first, second):
            return "two draws are the same"
        if state.device.type != "cpu":
            return f"the state lies on {state.device}, not on the host"
    finally:
        accelerator.restore_random_state(kept)
    return None


def _pinned_copies(accelerator: Accelerator) -> str | None:
    """Pinned memory goes to the device and back unchanged, behind an event."""
    source = accelerator.pinned((3, 1031), torch.float32)
    source.copy_(torch.arange(3 * 1031, dtype=torch.float32).reshape(3, 1031))
    target = accelerator.pinned((3, 1031), torch.float32)
    target.zero_()
    with accelerator.lane("copy"):
        there = accelerator.to_device(source)
        if there.device != accelerator.device:
            return f"the copy is on {there.device}, expected {accelerator.device}"
        back = accelerator.to_host(there + 1.0, into=target)
        done = accelerator.event()
        done.record()
    done.synchronize()
    if back.data_ptr() != target.data_ptr():
        return "the copy did not go into the memory that was given"
    if not torch.equal(target, source + 1.0):
        return "the numbers that came back are others"
    if not torch.equal(accelerator.to_host(there), source):
        return "the numbers that came back are others"
    return None


def _graph_replayed(accelerator: Accelerator) -> str | None:
    """A captured graph gives what the same work gives without it, on new inputs."""
    x = accelerator.to_device(torch.ones(64, 64))
    weight = accelerator.to_device(torch.eye(64) * 2.0)

    def work() -> Tensor:
        return torch.relu(x @ weight) + 1.0

    replay = accelerator.capture(work)
    if replay is None:
        raise Unsupported("the chip has no graphs")
    for value in (3.0, -5.0):
        x.fill_(value)
        replayed = replay().clone()
        accelerator.synchronize()
        if not torch.equal(replayed.cpu(), work().cpu()):
            return f"a replay on inputs of {value:g} differs from the work itself"
    return None


def _graphs_trained(accelerator: Accelerator) -> str | None:
    """Forward and backward as two graphs of one pool give what autograd gives, on new inputs."""
    pool = accelerator.graph_pool()
    if pool is None:
        raise Unsupported("the chip has no graphs that share memory")
    x = accelerator.to_device(torch.ones(64, 64)).requires_grad_()
    weight = accelerator.to_device(torch.eye(64) + 0.5).requires_grad_()
    gradient = accelerator.to_device(torch.ones(64, 64))
    made: dict[str, Tensor] = {}

    def forward() -> None:
        made["y"] = torch.relu(x @ weight).square() + 1.0

    def backward() -> None:
        made["x"], made["weight"] = torch.autograd.grad([made["y"]], [x, weight], [gradient])

    forward()
    backward()  # what libraries make for the first time is made outside of graphs
    made.clear()  # and its way back with it: it would tie the leaves to the stream it ran on
    up = accelerator.capture(forward, pool=pool, warm_ups=0)
    assert up is not None
    up()
    down = accelerator.capture(backward, pool=pool, warm_ups=0)
    assert down is not None
    captured = dict(made)
    for value in (0.25, -0.5, 2.0):
        with torch.no_grad():
            x.fill_(value)
            gradient.fill_(3.0 * value)
        up()
        down()
        accelerator.synchronize()
        gradients = {name: tensor.detach().cpu() for name, tensor in captured.items()}
        forward()
        backward()
        wrong = [
            name for name, tensor in made.items() if not torch.equal(gradients[name], tensor.cpu())
        ]
        if wrong:
            return f"inputs of {value:g}: '{wrong[0]}' of a replay differs from the work itself"
    return None


CHECKS: dict[str, Callable[[Accelerator], str | None]] = {
    "memory counted": _memory_counted,
    "memory limit": _memory_limited,
    "memory limit in backward": _memory_limited_backward,
    "lanes in order": _lanes_ordered,
    "time between events": _time_measured,
    "random state restored": _random_restored,
    "pinned copies": _pinned_copies,
    "graph replayed": _graph_replayed,
    "graphs of forward and backward": _graphs_trained,
}
