"""The calls of the conformance kit, as data: awkward sizes, layouts and options per operator."""

from __future__ import annotations

from tutti.accelerator.conformance.case import Case
from tutti.accelerator.conformance.cases import (
    adapted,
    attention,
    experts,
    head,
    linear,
    norm,
    optimizer,
    paged,
    pointwise,
    quantised,
    sampling,
)

CASES: tuple[Case, ...] = (
    *linear.CASES,
    *quantised.CASES,
    *adapted.CASES,
    *norm.CASES,
    *pointwise.CASES,
    *attention.CASES,
    *paged.CASES,
    *head.CASES,
    *sampling.CASES,
    *experts.CASES,
    *optimizer.CASES,
)
