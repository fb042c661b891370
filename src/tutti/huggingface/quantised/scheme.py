"""`Scheme`: what config.json's `quantization_config` says of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tutti.document import shown
from tutti.errors import InputError, hint

METHODS = (
    "fp8", "fbgemm_fp8", "int8", "w8a8_int8", "bitsandbytes", "awq", "gptq", "compressed-tensors"
)  # fmt: skip
_FORMATS = (
    "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision"
)  # fmt: skip
_BITS = (2, 3, 4, 8)  # of packed integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How weights are stored."""

    method: str
    bits: frozenset[int] = frozenset()  # of packed integers; empty: whole bytes
    group: int | None = None  # input columns of a scale; None: all of them
    block: tuple[int, int] | None = None  # rows and columns of a scale of 8-bit floats
    shift: int = 0  # added to stored zeros


def read_scheme(value: object, place: str) -> Scheme:
    """Return what a `quantization_config` says; refuse what is not known, in one line."""
    if not isinstance(value, Mapping):
        raise InputError(f"{place}: 'quantization_config' is {shown(value)}; expected a mapping")
    where = f"{place}: 'quantization_config'"
    method = value.get("quant_method")
    if method not in METHODS:
        advice = hint(str(method), METHODS)
        raise InputError(f"{where}: 'quant_method' is {shown(method)}; {advice}")
    match method:
        case "fp8" | "fbgemm_fp8":
            return Scheme(method="fp8", block=_block(value.get("weight_block_size"), where))
        case "awq":
            return _awq(value, where)
        case "gptq":
            return _gptq(value, where)
        case "compressed-tensors":
            return _compressed(value, where)
        case "bitsandbytes":
            if not value.get("load_in_8bit", value.get("_load_in_8bit")):
                raise InputError(
                    f"{where}: bitsandbytes with 4 bits; tutti reads its 8 bits (load_in_8bit)"
                )
    return Scheme(method="int8")


def _block(value: object, where: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(map(_natural, value)):
        raise InputError(f"{where}: 'weight_block_size' is {shown(value)}; expected two sizes")
    return int(value[0]), int(value[1])


def _awq(value: Mapping[str, Any], where: str) -> Scheme:
    version = str(value.get("version", "gemm")).lower()
    if version != "gemm":
        raise InputError(f"{where}: 'version' is {shown(version)}; tutti reads AWQ's 'gemm'")
    bits = value.get("bits", value.get("w_bit", 4))
    if bits != 4:
        raise InputError(f"{where}: 'bits' is {shown(bits)}; AWQ has 4")
    return Scheme(method="awq", bits=frozenset((4,)), group=_group(value, where))


def _gptq(value: Mapping[str, Any], where: str) -> Scheme:
    form = value.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise InputError(
            f"{where}: 'checkpoint_format' is {shown(form)}; tutti reads gptq, gptq_v2"
        )
    bits = value.get("bits")
    if bits not in _BITS:
        raise InputError(f"{where}: 'bits' is {shown(bits)}; tutti reads 2, 3, 4 and 8")
    return Scheme(
        method="gptq",
        bits=frozenset((int(bits),)),
        group=_group(value, where),
        shift=1 if form == "gptq" else 0,
    )


def _group(value: Mapping[str, Any], where: str) -> int | None:
    group = value.get("group_size", value.get("q_group_size", 128))
    if group in (-1, None):
        return None
    if not _natural(group):
        raise InputError(f"{where}: 'group_size' is {shown(group)}; expected -1 or a size")
    return int(group)


def _compressed(value: Mapping[str, Any], where: str) -> Scheme:
    groups = value.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise InputError(f"{where}: 'config_groups' is {shown(groups)}; expected a mapping")
    sparse = value.get("sparsity_config") or {}
    if isinstance(sparse, Mapping) and sparse.get("format") not in (None, "dense"):
        raise InputError(f"{where}: weights are sparse ({shown(sparse['format'])}); tutti has none")
    bits: set[int] = set()
    block = None
    for name, group in groups.items():
        own = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(own, Mapping):
            raise InputError(f"{where}: group '{name}' says nothing of its weights")
        form = group.get("format") or value.get("format")
        if form not in _FORMATS:
            raise InputError(f"{where}: group '{name}': 'format' is {shown(form)}; {_known(form)}")
        count: Any = own.get("num_bits")
        if count not in range(2, 9) or own.get("type") not in ("int", "float"):
            kind = f"{shown(own.get('type'))} of {shown(count)} bits"
            raise InputError(f"{where}: group '{name}': weights are {kind}; expected 2 to 8")
        bits.add(count)
        block = block or _block(own.get("block_structure"), where)
    return Scheme(method="compressed-tensors", bits=frozenset(bits), block=block)


def _known(form: object) -> str:
    return hint(str(form), _FORMATS)


def _natural(value: object) -> bool:
    return type(value) is int and value > 0
