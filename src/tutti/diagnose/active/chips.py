"""Every chip of this machine alone: products (right ones first), memory, copies."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Sequence

import torch

from tutti.accelerator.accelerator import Accelerator
from tutti.accelerator.arithmetic import Product, wrong_product
from tutti.accelerator.devices.emulated import EmulatedAccelerator
from tutti.accelerator.find import count, kinds, open_accelerator
from tutti.accelerator.products import product
from tutti.accelerator.profiling.cases import ProfileCase, prepare
from tutti.accelerator.profiling.links import device_links
from tutti.accelerator.profiling.timer import Run, Samples, Timer, timer_for
from tutti.accelerator.profiling.workspace import TORCH_DTYPES, Workspace
from tutti.cost.measured.forms import FORMS, row_name
from tutti.diagnose.cluster.chips import WRONG, ChipReading
from tutti.hardware.chip import Dtype
from tutti.hardware.profile import OperatorTime, Profile

CALL_S = 0.1  # the longest call of a Profile that is made again
LEAST_CALL_S = 1e-3  # shorter ones tell of the host more than of the chip
CASES = 3
REPEATS = 7
HOST_SIDE, CHIP_SIDE = 256, 4096  # of the product that is timed where there is no Profile
_TRIES, _AGREE = 10, 1.02
_OPERATOR = "linear"
_CHECKED = (Product(64, 512, 512), Product(256, 1024, 768))


def chips_here(device: str | None = None) -> list[Accelerator]:
    """Return the chips of this machine: of the first kind that is here, or those asked for."""
    if device is not None:
        return [open_accelerator(device)]
    kind = next(k for k in kinds() if count(k))
    return [
        open_accelerator(f"{kind}:{i}" if count(kind) > 1 else kind) for i in range(count(kind))
    ]


def read_chip(
    accelerator: Accelerator,
    profiles: Sequence[Profile] = (),
    *,
    repeats: int = REPEATS,
    checks_products: bool = True,
) -> ChipReading:
    """Return what a chip takes for what its Profile has; without one, for a product of our own."""
    chip = accelerator.chip
    timer = None if isinstance(accelerator, EmulatedAccelerator) else timer_for(accelerator)
    issues = timer is not None and timer.issues
    profile = next((p for p in profiles if p.chip.casefold() == chip.casefold()), None)
    kinds_ = [row.dtype for row in profile.operators] if profile is not None else []
    dtype = statistics.mode(kinds_) if kinds_ else Dtype.BF16 if issues else Dtype.FP32
    kind = TORCH_DTYPES[dtype]
    said = wrong_product(accelerator, _CHECKED, kind) if checks_products else None
    seconds: dict[str, float] = {}
    expected: dict[str, float] = {}
    rows = _rows(profile, dtype)
    if rows:
        seconds["products"] = _against(accelerator, timer, dtype, rows, repeats)
        expected["products"] = 1.0
    else:
        side = CHIP_SIDE if issues else HOST_SIDE
        matrix = torch.ones(side, side, dtype=kind, device=accelerator.device)
        seconds["products"] = _median(
            accelerator, timer, lambda: product(matrix, matrix), 5e-3, repeats
        )
    known = {one.kind: one for one in profile.links} if profile is not None else {}
    for one in device_links(accelerator, timer) if known and timer is not None else ():
        if one.kind in known:
            seconds[one.kind] = 1.0 / one.bandwidth
            expected[one.kind] = 1.0 / known[one.kind].bandwidth
    return ChipReading(
        name=f"{platform.node()}/{chip} {accelerator.device.index or 0}", kind=chip,
        seconds=seconds, expected=expected, wrong=f"{WRONG}: {said}" if said else "",
    )  # fmt: skip


def _rows(profile: Profile | None, dtype: Dtype) -> list[OperatorTime]:
    """Return the products of a Profile to make again: the longest that are not too long."""
    wanted = row_name(_OPERATOR, FORMS[_OPERATOR].directions[0])
    rows = [
        row for row in (profile.operators if profile is not None else ())
        if row.operator == wanted and row.dtype is dtype and row.seconds <= CALL_S
    ]  # fmt: skip
    long = [row for row in rows if row.seconds >= LEAST_CALL_S] or rows
    return sorted(long, key=lambda row: -row.seconds)[:CASES]


def _against(
    accelerator: Accelerator,
    timer: Timer | None,
    dtype: Dtype,
    rows: Sequence[OperatorTime],
    repeats: int,
) -> float:
    """Return how many times as long as its Profile says a chip takes, the median of products."""
    space = Workspace(accelerator, dtype)
    ratios = []
    for row in rows:
        made = prepare(ProfileCase(_OPERATOR, row.shape), space, accelerator.operators)
        run = made.runs[FORMS[_OPERATOR].directions[0]]
        ratios.append(_median(accelerator, timer, run, row.seconds, repeats) / row.seconds)
    return statistics.median(ratios)


def _median(
    accelerator: Accelerator, timer: Timer | None, run: Run, about_s: float, repeats: int
) -> float:
    """Return the median of some samples; of an emulated chip its shortest by the clock.

    What else the host does can only lengthen an emulated pass.
    """
    run()
    if timer is None:
        return _shortest(accelerator, run, repeats)
    samples = Samples()
    for _ in range(repeats):
        timer.sample(run, timer.calls_for(about_s), samples)
    return samples.median


def _shortest(accelerator: Accelerator, run: Run, repeats: int) -> float:
    """Return the shortest pass, when three agree with it; a busy host is given more tries."""
    passes: list[float] = []
    while len(passes) < _TRIES * repeats:
        passes.append(_paced(accelerator, run))
        passes.sort()
        if len(passes) >= repeats and passes[2] <= _AGREE * passes[0]:
            break
    return passes[0]


def _paced(accelerator: Accelerator, run: Run) -> float:
    began = time.perf_counter()
    with accelerator.paced():
        run()
    return time.perf_counter() - began
