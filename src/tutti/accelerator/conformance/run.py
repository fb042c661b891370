"""Checks a device: every implementation of every operator on every case, then the device itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator
from tutti.accelerator.conformance import collectives, device, vocabulary
from tutti.accelerator.conformance.call import Alone, Results, UnsupportedError, run_case
from tutti.accelerator.conformance.case import Case, drawn
from tutti.accelerator.conformance.cases import CASES
from tutti.accelerator.conformance.compare import Distance, distance
from tutti.accelerator.conformance.report import Outcome, Report, Verdict
from tutti.accelerator.conformance.tolerance import DTYPES
from tutti.accelerator.host import rows
from tutti.accelerator.operators import Operators
from tutti.accelerator.products import product
from tutti.accelerator.registry import (
    REFERENCES,
    Implementation,
    implementations,
    operator_names,
)
from tutti.errors import InputError, hint

HOST = torch.device("cpu")
Progress = Callable[[str, int, int], None]  # what is being checked, how much is done, of how much


def dtype_name(dtype: torch.dtype) -> str:
    """Return 'bfloat16' for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def check(
    accelerator: Accelerator,
    operators: Sequence[str] = (),
    *,
    progress: Progress | None = None,
) -> Report:
    """Check some operators, or all of them and the device."""
    for operator in operators:
        if operator not in operator_names():
            raise InputError(f"no operator '{operator}'; {hint(operator, operator_names())}")
    rows.hurry()  # what is checked is what runs in the long run
    started = time.perf_counter()
    outcomes: list[Outcome] = []
    for outcome in _outcomes(accelerator, tuple(operators), progress or (lambda *_: None)):
        outcomes.append(outcome)
        if outcome.verdict is Verdict.FAILED and not _answers(accelerator):
            after = f"after {outcome.subject} · {outcome.name}, nothing runs on it any more"
            outcomes.append(device.outcome("answers to the end", Verdict.FAILED, after))
            break
    return Report(
        kind=accelerator.name,
        chip=accelerator.chip,
        device=str(accelerator.device),
        software=f"torch {torch.__version__}",
        seconds=time.perf_counter() - started,
        outcomes=tuple(outcomes),
    )


def _outcomes(
    accelerator: Accelerator, operators: tuple[str, ...], progress: Progress
) -> Iterator[Outcome]:
    wanted = operators or operator_names()
    cases = [case for case in CASES if case.operator in wanted]
    dtypes = dict(_dtypes(accelerator))
    present = [dtype for dtype, missing in dtypes.items() if missing is None]
    for number, case in enumerate(cases):
        progress(case.operator, number, len(cases))
        for dtype in present:
            yield from _check_case(accelerator, case, dtype)
    if vocabulary.OPERATOR in wanted:
        yield from vocabulary.check(accelerator, present)
    if not operators:
        progress("the device", len(cases), len(cases))
        yield from _dtype_outcomes(dtypes)
        yield from device.check(accelerator)
        yield from collectives.check(accelerator)


def _answers(accelerator: Accelerator) -> bool:
    """Tell whether the device still computes: a bad access ends some for the whole process."""
    try:
        return float(accelerator.to_device(torch.ones(4)).sum()) == 4.0
    except Exception:  # whatever it says, it does not answer
        return False


def _dtypes(accelerator: Accelerator) -> Iterator[tuple[torch.dtype, str | None]]:
    """Yield the dtypes, and why the device does not have one."""
    for dtype in DTYPES:
        try:
            ones = accelerator.to_device(torch.ones(2, 2, dtype=dtype))
            missing = (
                None if float(product(ones, ones).sum()) == 8.0 else "a product of ones is wrong"
            )
        except (RuntimeError, TypeError, NotImplementedError) as error:
            missing = _one_line(error)
        yield dtype, missing


def _dtype_outcomes(dtypes: dict[torch.dtype, str | None]) -> Iterator[Outcome]:
    for dtype, missing in dtypes.items():
        # float32 is what sums and masters are kept in; the others a chip may lack
        lacking = Verdict.FAILED if dtype is torch.float32 else Verdict.UNSUPPORTED
        yield device.outcome(
            f"dtype {dtype_name(dtype)}", lacking if missing else Verdict.PASSED, missing or ""
        )


def _check_case(accelerator: Accelerator, case: Case, dtype: torch.dtype) -> Iterator[Outcome]:
    numbers = drawn(case, dtype)
    reference = Implementation(
        operator=case.operator, name="reference", function=REFERENCES[case.operator]
    )
    expected = run_case(case, Alone(HOST.type, reference), numbers, HOST, dtype=torch.float64)
    for implementation in implementations(case.operator, accelerator.device.type):
        yield from check_implementation(accelerator, implementation, case, dtype, numbers, expected)


def check_implementation(
    accelerator: Accelerator,
    implementation: Implementation,
    case: Case,
    dtype: torch.dtype,
    numbers: Sequence[Tensor],
    expected: Results,
) -> Iterator[Outcome]:
    """Yield the outcomes of one implementation on one case: forward, backward, repeated."""

    def outcome(check: str, verdict: Verdict, detail: str = "", error: float = 0.0) -> Outcome:
        return Outcome(
            subject=case.operator,
            check=check,
            verdict=verdict,
            implementation=implementation.name,
            dtype=dtype_name(dtype),
            case=case.name,
            detail=detail,
            error=error,
        )

    backward = implementation.exact and bool(expected.backward)
    operators: Operators = Alone(accelerator.device.type, implementation)
    try:
        result = run_case(case, operators, numbers, accelerator.device, backward=backward)
        again = run_case(case, operators, numbers, accelerator.device, backward=backward)
        accelerator.synchronize()
    except UnsupportedError as reason:
        yield outcome("forward", Verdict.UNSUPPORTED, str(reason))
        return
    except Exception as error:  # a vendor's kernel may fail in any way; each is an answer here
        yield outcome("forward", Verdict.FAILED, f"{type(error).__name__}: {_one_line(error)}")
        return
    wanted = {"forward": expected.forward, "backward": expected.backward if backward else {}}
    for direction, tensors in wanted.items():
        if tensors:
            worst = _worst(getattr(result, direction), tensors, dtype, case.terms)
            bad = result.complaint if direction == "backward" else ""
            failed = bool(bad) or worst.part > 1
            verdict = Verdict.FAILED if failed else Verdict.PASSED
            yield outcome(direction, verdict, bad or worst.detail, worst.part)
    moved = _moved(result, again, implementation.deterministic)
    yield outcome("repeat", Verdict.FAILED if moved else Verdict.PASSED, moved)


def _worst(
    got: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype, terms: int
) -> Distance:
    """Return the largest error among the tensors of one direction."""
    if len(got) != len(expected):
        return Distance(float("inf"), f"gave {len(got)} results, expected {len(expected)}")
    pairs = zip(expected, got.values(), expected.values(), strict=True)
    return max(
        (distance(name, own, other, dtype, terms) for name, own, other in pairs),
        key=lambda difference: difference.part,
    )


def _moved(first: Results, second: Results, deterministic: bool) -> str:
    """Say which result of the same call twice was not the same."""
    for (direction, name, a), (_, _, b) in zip(first.all(), second.all(), strict=True):
        if direction == "backward" and not deterministic:
            continue
        a, b = (x.float() if x.itemsize == 1 and x.is_floating_point() else x for x in (a, b))
        # not torch.equal: a device may lack its kernel, and NaN must equal NaN here
        if not torch.equal(torch.nan_to_num(a.detach().cpu()), torch.nan_to_num(b.detach().cpu())):
            return f"{name} differs when the same call runs again"
    return ""


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
