"""Calls of the norms, alone and with the residual added."""

from __future__ import annotations

from typing import Any

from tutti.accelerator.conformance.case import Case, Layout, Values

EPS = 1e-5


def _cases(operator: str, *, residual: bool, bias: bool) -> tuple[Case, ...]:
    def case(
        name: str,
        shape: tuple[int, ...],
        *,
        layout: Layout = "contiguous",
        affine: bool = True,
        biased: bool = True,
        zero_rows: bool = False,
        **options: Any,
    ) -> Case:
        inputs = Values(shape, layout=layout, zero_rows=zero_rows)
        weight = Values(shape[-1:]) if affine else None
        arguments: tuple[Any, ...] = (inputs, *([inputs] if residual else []), weight)
        if bias:
            arguments += (Values(shape[-1:]) if affine and biased else None,)
        return Case(operator, name, arguments, {"eps": EPS, **options}, terms=max(*shape, 1))

    cases = [
        case("1 token", (1, 64)),
        case("odd width", (5, 33)),
        case("not a power of two", (7, 5120)),
        case("wide", (3, 16_384)),
        case("many tokens", (1031, 48)),
        case("heads", (9, 3, 80)),
        case("narrow", (13, 6)),
        case("sliced rows", (11, 96), layout="sliced"),
        case("some heads", (11, 4, 64), layout="heads"),
        case("without weight", (6, 64), affine=False),
        case("rows of zeros", (6, 64), zero_rows=True),
        case("no tokens", (0, 64)),
    ]
    if bias:
        cases.append(case("without bias", (6, 64), biased=False))
    else:
        cases.append(case("unit offset", (6, 80), unit_offset=True))
    return tuple(cases)


def _narrow(name: str, shape: tuple[int, ...], *, residual: bool = True, **options: Any) -> Case:
    x = Values(shape, layout=options.pop("layout", "contiguous"), trained=False)
    weight = Values(shape[-1:], trained=False) if options.pop("affine", True) else None
    arguments = (x, x if residual else None, weight)
    return Case("narrow_rms_norm", name, arguments, {"eps": EPS, **options}, terms=shape[-1])


CASES = (
    _narrow("1 token", (1, 64)),
    _narrow("no residual", (5, 96), residual=False),
    _narrow("not a power of two", (7, 5120)),
    _narrow("unit offset", (9, 80), unit_offset=True),
    _narrow("no weight", (9, 80), affine=False),
    _narrow("sliced", (9, 80), layout="sliced"),
    _narrow("no tokens", (0, 80)),
    Case("add_rms_norm", "no residual", (Values((7, 96)), None, Values((96,))), {"eps": EPS}, 96),
    Case(
        "add_layer_norm", "no residual", (Values((7, 96)), None, Values((96,)), Values((96,))),
        {"eps": EPS}, 96,
    ),
    *_cases("rms_norm", residual=False, bias=False),
    *_cases("layer_norm", residual=False, bias=True),
    *_cases("add_rms_norm", residual=True, bias=False),
    *_cases("add_layer_norm", residual=True, bias=True),
)  # fmt: skip
