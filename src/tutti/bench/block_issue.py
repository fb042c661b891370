"""What the host needs to issue a whole block, beside what its operators need one by one.

Between operators a block cuts, joins and hands on tensors, and the host's caches are not as warm as
in a loop over one operator; going back, on the other hand, autograd is entered once for all. So a
profile's issue times are scaled until they add up to what a block takes: first all of them by a
dense block, then those of experts and of products in 8 bits by blocks that have some.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from tutti.accelerator.accelerator import Accelerator
from tutti.accelerator.profiling.workspace import TORCH_DTYPES
from tutti.bench.block_runs import BlockShape, summed_run
from tutti.cost.measured.calls import unit_calls
from tutti.cost.measured.chip import MeasuredChip
from tutti.cost.measured.rescale import PassFactors, reissued
from tutti.cost.measured.unit import measured_unit, strategy_of
from tutti.hardware.chip import Dtype
from tutti.hardware.profile import Profile
from tutti.models.load import load_model
from tutti.models.operators import Workload
from tutti.models.spec import ModelSpec

TOKENS = 64  # so few that a chip is done before the host has issued the next operator
WARM_UP, REPEATS, IN_A_ROW = 3, 5, 4
IN_A_STEP = 1.3
"""How much longer the host takes over a block in a step than over the same block in a loop.

On an H200's host 1.26 (`benchmarks/host_time.py`) to 1.4 (traces of a step of 8 micro-batches).
"""
GRAPH_SHARE = 0.073
"""Of that time, what is left where blocks run as graphs and weight passes by themselves.

On an H200's host (`benchmarks/host_time.py --graphs`): 0.305 of 4.17 ms (SmolLM2-135M), 0.302 of
4.31 (Llama-1B), 0.353 of 4.45 (Qwen3-0.6B).
"""


WITH_EXPERTS = "qwen3-30b-a3b"
EXPERTS = ("route", "permute", "grouped_linear", "unpermute")
MOST = 4.0  # times that operators of a family are scaled by, either way


def with_block_issue(
    profile: Profile, spec: ModelSpec, accelerator: Accelerator, dtype: Dtype
) -> Profile:
    """Return the profile with issue times that add up to those of the model's first block."""
    shape = BlockShape(name=spec.name, spec=spec, config=None, sequences=1, length=TOKENS)
    run = summed_run(shape, accelerator, dtype)
    forward = _issue_s(run.forward, accelerator)
    both = _issue_s(run.step, accelerator)
    work = strategy_of(Workload(sequences=1, sequence_length=TOKENS))
    summed = measured_unit(MeasuredChip(profile, dtype), unit_calls(spec, 1, work))
    factors = PassFactors(
        forward=IN_A_STEP * _ratio(forward, float(summed.issue_forward_s)),
        backward=IN_A_STEP * _ratio(both - forward, float(summed.issue_backward_s)),
    )
    has_graphs = accelerator.graph_pool() is not None
    issued = replace(reissued(profile, factors), graph_share=GRAPH_SHARE if has_graphs else 1.0)
    if accelerator.operators.emulated(TORCH_DTYPES[dtype], accelerator.device):
        return issued
    experts = load_model(WITH_EXPERTS)
    for own, kind, operators in (
        (experts, dtype, EXPERTS),
        (spec, Dtype.FP8, ("narrow_linear",)),
        (experts, Dtype.FP8, ("narrow_grouped_linear",)),
    ):
        issued = _of_family(issued, own, accelerator, kind, operators)
    return issued


def _of_family(
    profile: Profile,
    spec: ModelSpec,
    accelerator: Accelerator,
    dtype: Dtype,
    operators: Collection[str],
) -> Profile:
    """Return the profile with times of some operators that make up for the rest of a block's."""
    measured = {row.operator.partition(".")[0] for row in profile.operators}
    if not set(operators) <= measured:
        return profile
    shape = BlockShape(name=spec.name, spec=spec, config=None, sequences=1, length=TOKENS)
    run = summed_run(shape, accelerator, dtype)
    forward, both = (_issue_s(each, accelerator) for each in (run.forward, run.step))
    chip = MeasuredChip(profile, dtype)
    calls = unit_calls(spec, 1, strategy_of(Workload(sequences=1, sequence_length=TOKENS)))
    of_all = measured_unit(chip, calls)
    of_own = measured_unit(chip, [call for call in calls if chip.operator_of(call) in operators])
    pairs = (
        (forward, of_all.issue_forward_s, of_own.issue_forward_s),
        (both - forward, of_all.issue_backward_s, of_own.issue_backward_s),
    )
    factors = [
        min(MOST, max(1.0 / MOST, _ratio(IN_A_STEP * whole - float(all_) + float(own), float(own))))
        for whole, all_, own in pairs
    ]
    return reissued(profile, PassFactors(forward=factors[0], backward=factors[1]), operators)


def _issue_s(run: Callable[[], object], accelerator: Accelerator) -> float:
    """Return the least host time of a call."""
    for _ in range(WARM_UP):
        run()
    seconds = []
    for _ in range(REPEATS):
        accelerator.synchronize()
        begin = time.perf_counter()
        for _ in range(IN_A_ROW):
            run()
        seconds.append((time.perf_counter() - begin) / IN_A_ROW)
    accelerator.synchronize()
    return min(seconds)


def _ratio(whole: float, parts: float) -> float:
    return whole / parts if whole > 0 and parts > 0 else 1.0
