"""Constants from operator measurements: a `Profile`'s table instead of whole training runs.

Fitted as runs are: z log-sigmas from the priors, soft-L1 on ln(predicted/measured). A constant that
too few measurements tell of keeps its prior, and the calibration's rule says so. What can be
measured stands in `evidence`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tutti.cost.arrays import FloatArray
from tutti.cost.calibration.baseline import errors_pct
from tutti.cost.calibration.evidence import DIMS, Evidence, evidence_of
from tutti.cost.calibration.shipped import Calibration, FitReport, Fitted
from tutti.cost.calibration.solve import solve
from tutti.cost.calibration.stacks import Stack
from tutti.cost.constants import Constants, registry
from tutti.document import Place
from tutti.hardware.library import shipped
from tutti.hardware.node import NodeType
from tutti.hardware.profile import Profile

NOISE = 0.01  # of the logarithm: a median of repeats scatters less than a run
# What operators and links can tell; two more are freed where odd rows or head dimensions are.
CONSTANTS = (
    "gemm_efficiency",
    "gemm_fill_s",
    "wave_quantisation",
    "kernel_gap_s",
    "hbm_efficiency",
    "flash_efficiency",
    "flash_backward_ratio",
    "link_efficiency",
    "link_latency_s",
    "nic_efficiency",
    "nic_latency_s",
)
_DIGITS = 6
_UNTOLD = 1e-6  # a slope, or a move in log-sigmas, below which the measurements said nothing


def calibrate_from_profile(
    profile: Profile, node: NodeType | None = None, *, file: str = "profile"
) -> Calibration:
    """Return the constants that explain a profile best; the node is the chip's usual one.

    The machine's nominal figures come from the catalog.
    """
    chip = node.chip if node is not None else shipped().chip(profile.chip, Place(file).key("chip"))
    evidence = evidence_of(profile, chip, node or shipped().node_for(chip))
    told = {name for each in evidence for name in each.tells}
    stack = Stack(
        stack=profile.stack or "operators",
        chips=(chip.name,),
        groups=(),
        compute=tuple(name for name in registry() if name in told),
        cluster=(),
        noise=NOISE,
    )
    return _calibration(profile, stack, evidence, _fit(stack, evidence))


def calibrate_from_file(path: Path) -> Calibration:
    """Return the constants that a profile file tells."""
    return calibrate_from_profile(Profile.load(path), file=path.name)


# --- the fit ---------------------------------------------------------------------------------


def _constants(stack: Stack, z: FloatArray) -> Constants:
    return Constants(**{n: stack.value(n, z[..., i, None]) for i, n in enumerate(stack.compute)})


def _predict(evidence: Sequence[Evidence], constants: Constants) -> FloatArray:
    return np.concatenate([each.predict(constants) for each in evidence], axis=-1)


def _fit(stack: Stack, evidence: Sequence[Evidence]) -> dict[str, float]:
    telling = [each for each in evidence if each.tells]
    if not stack.compute:
        return {}
    measured = np.concatenate([each.measured for each in telling])
    z, jacobian = solve(
        lambda z: _predict(telling, _constants(stack, z)),
        measured,
        noise=stack.noise,
        size=len(stack.compute),
        evaluations=200,
    )
    slopes = np.abs(jacobian[: len(measured)]).max(axis=0)
    return {
        name: float(stack.value(name, z[i]))
        for i, name in enumerate(stack.compute)
        if slopes[i] > _UNTOLD or abs(z[i]) > _UNTOLD  # no product waits for memory, say
    }


# --- the written form ------------------------------------------------------------------------


def _calibration(
    profile: Profile, stack: Stack, evidence: Sequence[Evidence], values: dict[str, float]
) -> Calibration:
    known = registry()
    fitted = {
        name: Fitted(value=float(f"{value:.{_DIGITS}g}"), unit=known[name].unit)
        for name, value in values.items()
    }
    name = _slug(f"{profile.chip} {profile.stack} operators")
    cluster = {n: fitted[n] for n in fitted if known[n].scope == "cluster"}
    predicted = _predict(evidence, Constants(**values))
    errors = errors_pct(predicted, np.concatenate([each.measured for each in evidence]))
    return Calibration(
        name=name,
        stack=stack.stack,
        chips=stack.chips,
        groups=(name,) if cluster else (),
        date=profile.date,
        origin=profile.origin,
        rule=_rule(evidence, values),
        compute={n: fitted[n] for n in fitted if n not in cluster},
        clusters={name: cluster} if cluster else {},
        fit=FitReport(
            rows=len(errors),
            mape_pct=round(float(errors.mean()), 2),
            worst_pct=round(float(errors.max()), 2),
        ),
        ranges={},
        rows=(),
    )


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.casefold()).strip("-")


def _rule(evidence: Sequence[Evidence], values: dict[str, float]) -> str:
    """Say what the constants rest on: counts and spans, and what was left at its prior."""
    parts = []
    for each in evidence:
        count = f"{len(each.measured)} " if each.kind in DIMS else ""
        spans = f" ({each.spans})" if each.spans else ""
        parts.append(f"{count}{each.kind}{spans}" + ("" if each.tells else ", too few to fit"))
    kept = [name for name in CONSTANTS if name not in values]
    prior = f"; at their priors: {', '.join(kept)}" if kept else ""
    return f"operator measurements: {'; '.join(parts)}{prior}"
