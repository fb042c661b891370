"""Calls of products with weights of 8 and 4 bits, in every form that folders have them in."""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch

from tutti.accelerator.conformance.case import Case, Integers, Layout, Values
from tutti.accelerator.quantised import QuantisedWeight, quantise

_CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}


def _weight(
    name: str, kind: str, shape: tuple[int, ...], block: tuple[int, int], *, zeros: bool
) -> QuantisedWeight:
    """Return random codes with random scales; kinds as `_CODES` has them, or int4."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {kind}".encode()))
    *experts, out, width = shape
    blocks = (*experts, -(-out // block[0]), -(-width // block[1]))
    scales = torch.rand(blocks, generator=generator) * width**-0.5 + 0.1 * width**-0.5
    if kind == "int4":
        codes = torch.randint(
            0, 256, (*shape[:-1], width // 2), generator=generator, dtype=torch.uint8
        )
        scales = scales / 8
    elif kind == "int8":
        codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
        scales = scales / 128
    else:
        codes = torch.randn(shape, generator=generator).to(_CODES[kind])
    shifts = torch.randint(-8, 9, blocks, generator=generator, dtype=torch.int16)
    return QuantisedWeight(
        codes=codes, scales=scales, zeros=shifts if zeros else None, block=block
    )  # fmt: skip


def _linear(
    name: str,
    rows: tuple[int, ...],
    kind: str,
    shape: tuple[int, int],
    block: tuple[int, int],
    *,
    zeros: bool = False,
    bias: bool = False,
    layout: Layout = "contiguous",
    shuffled: bool = False,
    narrow_inputs: bool = False,
) -> Case:
    weight = _weight(name, kind, shape, block, zeros=zeros)
    weight = replace(weight, narrow_inputs=narrow_inputs)
    if shuffled:
        order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(1))
        weight = replace(weight, order=order)
    return Case(
        "quantised_linear",
        name,
        (
            Values((*rows, shape[1]), layout=layout, trained=False),
            weight,
            Values((shape[0],), trained=False) if bias else None,
        ),
        terms=max(shape),
    )


def _grouped(
    name: str,
    counts: tuple[int, ...],
    kind: str,
    shape: tuple[int, int],
    block: tuple[int, int],
    *,
    zeros: bool = False,
    bias: bool = False,
) -> Case:
    experts = len(counts)
    return Case(
        "quantised_grouped_linear",
        name,
        (
            Values((sum(counts), shape[1]), trained=False),
            _weight(name, kind, (experts, *shape), block, zeros=zeros),
            Integers(counts),
            Values((experts, shape[0]), trained=False) if bias else None,
        ),
        terms=max(shape),
    )


def _rounded(name: str, kind: str, shape: tuple[int, int]) -> Case:
    """Return a product with a weight that was rounded by us."""
    generator = torch.Generator().manual_seed(3)
    weight = quantise(torch.randn(shape, generator=generator) * shape[1] ** -0.5, kind)
    assert weight is not None
    return Case(
        "quantised_linear",
        name,
        (Values((5, shape[1]), trained=False), weight),
        terms=max(shape),
    )


CASES = (
    _linear("8-bit floats, a scale per tensor", (7,), "e4m3", (48, 64), (48, 64), bias=True),
    _linear("8-bit floats, per channel", (1,), "e4m3", (96, 64), (1, 64)),
    _linear("8-bit floats, blocks of 128", (3,), "e4m3", (200, 320), (128, 128), bias=True),
    _linear("8-bit floats with 5 bits of exponent", (9,), "e5m2", (33, 48), (1, 48)),
    _linear("8-bit floats, long sums", (2,), "e4m3", (16, 4096), (16, 4096)),
    _linear("8-bit floats, one row, ragged", (1,), "e4m3", (50, 1040), (1, 1040), bias=True),
    _linear("8-bit floats, tens of rows", (40,), "e4m3", (80, 1040), (1, 1040), bias=True),
    _linear("8-bit floats, hundred rows", (100,), "e4m3", (64, 2048), (128, 128)),
    _linear("both in 8 bits", (1,), "e4m3", (64, 256), (1, 256), narrow_inputs=True),
    _linear(
        "both in 8 bits, per tensor",
        (33,),
        "e4m3",
        (64, 96),
        (64, 96),
        narrow_inputs=True,
        bias=True,
    ),
    _linear("both in 8 bits, in blocks", (20,), "e4m3", (64, 256), (32, 128), narrow_inputs=True),
    _linear(
        "both in 8 bits, many rows",
        (200,),
        "e4m3",
        (64, 1024),
        (1, 1024),
        bias=True,
        narrow_inputs=True,
    ),
    _linear("both in 8 bits, integers", (5,), "int8", (48, 64), (1, 64), narrow_inputs=True),
    _linear("4 bits, one row, ragged", (1,), "int4", (40, 1120), (1, 32), zeros=True),
    _linear("no tokens", (0,), "e4m3", (32, 48), (32, 48), bias=True),
    _linear("8 bits, per tensor", (5,), "int8", (40, 24), (40, 24)),
    _linear("8 bits, per channel", (2, 9), "int8", (40, 33), (1, 33), bias=True),
    _linear("8 bits in groups, with zeros", (6,), "int8", (24, 128), (1, 32), zeros=True),
    _linear("8 bits, sliced input", (19,), "int8", (32, 48), (1, 48), layout="sliced"),
    _linear("4 bits in groups", (1,), "int4", (64, 256), (1, 128)),
    _linear("4 bits in groups, with zeros", (17,), "int4", (64, 128), (1, 32), zeros=True),
    _linear("4 bits, one group, odd outputs", (4,), "int4", (33, 96), (1, 96), zeros=True),
    _linear("4 bits, columns by group", (5,), "int4", (24, 64), (1, 32), shuffled=True),
    _linear("4 bits, many tokens", (515,), "int4", (40, 64), (1, 32), zeros=True, bias=True),
    _rounded("rounded to 8-bit floats", "fp8", (64, 96)),
    _rounded("rounded to 8 bits", "int8", (64, 96)),
    _rounded("rounded to 4 bits", "int4", (64, 96)),
    _grouped("8-bit floats, empty experts", (3, 0, 5, 0, 1), "e4m3", (48, 160), (32, 128)),
    _grouped("8 bits, bias", (0, 7, 0), "int8", (33, 24), (1, 24), bias=True),
    _grouped("4 bits, unequal loads", (1, 130, 17), "int4", (32, 64), (1, 32), zeros=True),
    _grouped("no tokens", (0, 0, 0), "int8", (16, 32), (1, 32), bias=True),
)
