"""Quantised folders, packed by hand from plain ones, each beside the plain one that it stands for.

Each packer makes codes of a weight and the tensors that its format stores; what they stand for is
computed from the codes here, not by the package.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tutti.huggingface.maps import key_table
from tutti.models import read_config

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, Tensor]


def words(numbers: Tensor, bits: int) -> Tensor:
    """Pack rows of unsigned numbers into 32-bit words, lowest bits first, bit by bit."""
    single = (numbers.long().unsqueeze(-1) >> torch.arange(bits)) & 1
    stream = single.flatten(1)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 32)).unflatten(1, (-1, 32))
    whole = (stream << torch.arange(32)).sum(-1)
    return torch.where(whole >= 2**31, whole - 2**32, whole).to(torch.int32)


def grouped(weight: Tensor, group: int, bits: int, *, symmetric: bool) -> tuple[Tensor, ...]:
    """Unsigned codes (out, in), zeros and scales (out, groups), and what they stand for."""
    out, width = weight.shape
    parts = weight.view(out, width // group, group)
    most = (1 << bits) - 1
    if symmetric:
        scales = (parts.abs().amax(-1) / (most / 2)).half().float()
        zeros = torch.full_like(scales, 1 << (bits - 1))
    else:
        low, high = parts.amin(-1), parts.amax(-1)
        scales = ((high - low) / most).half().float()
        zeros = (-low / scales).round().clamp(0, most)
    codes = ((parts / scales.unsqueeze(-1)).round() + zeros.unsqueeze(-1)).clamp(0, most)
    stands = (codes - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)
    return codes.view(out, width).int(), zeros.int(), scales, stands.view(out, width)


def awq(weight: Tensor, group: int = 32) -> tuple[Tensors, Tensor]:
    codes, zeros, scales, stands = grouped(weight, group, 4, symmetric=False)
    order = torch.tensor(AWQ_ORDER)

    def packed(numbers: Tensor) -> Tensor:  # (rows, out)
        return words(numbers.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4)

    return {
        "qweight": packed(codes.t()),
        "qzeros": packed(zeros.t()),
        "scales": scales.t().contiguous().half(),
    }, stands


def gptq(
    weight: Tensor, group: int = 32, bits: int = 4, *, sorted_: bool = False, shift: int = 1
) -> tuple[Tensors, Tensor]:
    out, width = weight.shape
    index = torch.arange(width) // group
    if sorted_:  # columns of one group lie anywhere
        index = index[torch.randperm(width, generator=torch.Generator().manual_seed(5))]
    order = index.argsort(stable=True)
    codes, zeros, scales, stands = grouped(weight[:, order], group, bits, symmetric=False)
    zeros = zeros.clamp_min(shift)  # what is stored cannot be below 0
    numbers = codes.view(out, -1, group)
    stands = ((numbers - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).view(out, width)
    back = order.argsort()
    return {
        "qweight": words(codes[:, back], bits).t().contiguous(),
        "qzeros": words((zeros - shift).t().contiguous(), bits),
        "scales": scales.t().contiguous().half(),
        "g_idx": index.int(),
    }, stands[:, back]


def fp8(weight: Tensor, block: tuple[int, int], name: str = "weight_scale_inv") -> Any:
    """A scale for each block; (1, 0): for each row, (0, 0): for all."""
    out, width = weight.shape
    high, wide = block[0] or out, block[1] or width
    rows, columns = -(-out // high), -(-width // wide)
    padded = torch.zeros(rows * high, columns * wide)
    padded[:out, :width] = weight
    parts = padded.view(rows, high, columns, wide)
    scales = parts.abs().amax((1, 3)) / 448
    codes = (parts / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    stands = (codes.float() * scales[:, None, :, None]).view(rows * high, columns * wide)
    codes = codes.view(rows * high, columns * wide)[:out, :width].contiguous()
    stored = scales if block[0] > 1 else scales.reshape(-1, 1) if block[0] else scales.reshape(())
    return {"weight": codes, name: stored.contiguous()}, stands[:out, :width].contiguous()


def int8(weight: Tensor, name: str = "weight_scale") -> tuple[Tensors, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    stored = (scales * 127).flatten() if name == "SCB" else scales
    return {"weight": codes, name: stored.contiguous()}, codes.float() * scales


def int8_asymmetric(weight: Tensor) -> tuple[Tensors, Tensor]:
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scales = (high - low) / 255
    zeros = (-128 - low / scales).round().clamp(-128, 127)
    codes = ((weight / scales).round() + zeros).clamp(-128, 127)
    return {
        "weight": codes.to(torch.int8), "weight_scale": scales,
        "weight_zero_point": zeros.to(torch.int8),
    }, (codes - zeros) * scales  # fmt: skip


def compressed(
    weight: Tensor, group: int = 32, bits: int = 4, *, symmetric: bool = True
) -> tuple[Tensors, Tensor]:
    codes, zeros, scales, stands = grouped(weight, group, bits, symmetric=symmetric)
    found = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        found["weight_zero_point"] = words(zeros.t().contiguous(), bits).t().contiguous()
    return found, stands


@dataclass(frozen=True)
class Format:
    """A way to store weights, and what config.json says of it."""

    config: dict[str, Any]
    pack: Callable[[Tensor], tuple[Tensors, Tensor]]


def _ct(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


_INT = {"num_bits": 8, "type": "int", "strategy": "channel"}
_GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_FLOAT = {"num_bits": 8, "type": "float", "strategy": "tensor"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
FORMATS: dict[str, Format] = {
    "fp8/tensor": Format({"quant_method": "fp8"}, lambda w: fp8(w, (0, 0), "weight_scale")),
    "fp8/channel": Format({"quant_method": "fbgemm_fp8"}, lambda w: fp8(w, (1, 0), "weight_scale")),
    "fp8/block": Format(
        {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"},
        lambda w: fp8(w, (32, 32)),
    ),
    "int8": Format({"quant_method": "w8a8_int8"}, int8),
    "bitsandbytes": Format(
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, lambda w: int8(w, "SCB")
    ),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "gptq": Format(_GPTQ, gptq),
    "gptq/v2": Format({**_GPTQ, "checkpoint_format": "gptq_v2"}, lambda w: gptq(w, shift=0)),
    "gptq/sorted": Format({**_GPTQ, "desc_act": True}, lambda w: gptq(w, sorted_=True)),
    "gptq/8": Format({**_GPTQ, "bits": 8}, lambda w: gptq(w, bits=8)),
    "gptq/3": Format({**_GPTQ, "bits": 3}, lambda w: gptq(w, bits=3)),
    "gptq/2": Format({**_GPTQ, "bits": 2, "group_size": 16}, lambda w: gptq(w, 16, bits=2)),
    "compressed/fp8": Format(
        _ct("float-quantized", **_FLOAT), lambda w: fp8(w, (0, 0), "weight_scale")
    ),
    "compressed/fp8 block": Format(
        _ct("float-quantized", **{**_FLOAT, "strategy": "block", "block_structure": [32, 32]}),
        lambda w: fp8(w, (32, 32), "weight_scale"),
    ),
    "compressed/int8": Format(_ct("int-quantized", **_INT), int8),
    "compressed/int8 zeros": Format(
        _ct("int-quantized", **{**_INT, "symmetric": False}), int8_asymmetric
    ),
    "compressed/int4": Format(_ct("pack-quantized", **_GROUP), compressed),
    "compressed/int4 zeros": Format(
        _ct("pack-quantized", **{**_GROUP, "symmetric": False}),
        lambda w: compressed(w, symmetric=False),
    ),
    "compressed/packed 8": Format(
        _ct("pack-quantized", **{**_GROUP, "num_bits": 8}), lambda w: compressed(w, bits=8)
    ),
}  # fmt: skip


def random_folder(folder: Path, config: dict[str, Any]) -> Path:
    """Write a model's folder with random weights, without transformers."""
    table = key_table(read_config(config, "model"))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        key: torch.randn(parts[0][1].shape, generator=generator) * 0.1
        for key, parts in table.stored.items()
        if not all(table.tensors[name].parameter.tied_to for name, _ in parts)
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def is_product(key: str, tensor: Tensor) -> bool:
    """Whether such formats quantise a tensor: the linear layers of blocks, no routers."""
    apart = ("mlp.gate.weight", "block_sparse_moe.gate.weight", "lm_head.weight", "norm")
    return (
        any(at in key for at in (".layers.", ".h."))
        and tensor.dim() == 2
        and not any(part in key for part in apart)
    )


def pack_folder(plain: Path, target: Path, form: Format) -> Path:
    """Write a quantised folder, and beside it (`-plain`) the weights that it stands for."""
    twin = target.parent / f"{target.name}-plain"
    for folder in (target, twin):
        shutil.copytree(plain, folder)
    packed: Tensors = {}
    stands: Tensors = {}
    for key, tensor in load_file(plain / "model.safetensors").items():
        if is_product(key, tensor):
            parts, stands[key] = form.pack(tensor.float())
            name = key.removesuffix("weight")
            packed |= {f"{name}{leaf}": part for leaf, part in parts.items()}
        else:
            packed[key] = stands[key] = tensor
    save_file(packed, target / "model.safetensors", {"format": "pt"})
    save_file(
        {k: t.contiguous() for k, t in stands.items()}, twin / "model.safetensors", {"format": "pt"}
    )
    path = target / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "quantization_config": form.config}))
    return twin
