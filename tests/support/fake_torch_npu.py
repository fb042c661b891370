"""A torch_npu that computes with plain torch, to its documented signatures, and notes every call.

Arguments that the documentation does not allow are refused, as the real one would.
"""

from __future__ import annotations

import itertools
import types
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.products import product

FAR = 2147483647


class FakeTorchNpu(types.ModuleType):
    """The module; `calls` holds the name and keyword arguments of every call."""

    def __init__(self) -> None:
        super().__init__("torch_npu")
        self.__spec__ = types.SimpleNamespace(name="torch_npu")  # type: ignore[assignment]
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def _note(self, name: str, **options: Any) -> None:
        self.calls.append((name, options))

    def npu_rms_norm(
        self, x: Tensor, gamma: Tensor, epsilon: float = 1e-6
    ) -> tuple[Tensor, Tensor]:
        assert x.dtype == gamma.dtype
        assert x.dtype in (torch.float16, torch.bfloat16, torch.float32)
        self._note("npu_rms_norm", epsilon=epsilon)
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        return (wide * rstd * gamma.float()).to(x.dtype), rstd

    def npu_add_rms_norm(
        self, x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():  # it has no gradient
            total = x1 + x2
            y, rstd = self.npu_rms_norm(total, gamma, epsilon)
        self._note("npu_add_rms_norm", epsilon=epsilon)
        return y, rstd, total

    def npu_rotary_mul(
        self, x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
    ) -> Tensor:
        assert x.dim() == r1.dim() == r2.dim() == 4
        assert x.shape[-1] == r1.shape[-1] == r2.shape[-1] < 896
        assert r1.shape[1] in (1, x.shape[1])
        assert r1.shape[2] in (1, x.shape[2])
        assert x.dtype == r1.dtype == r2.dtype
        self._note("npu_rotary_mul", rotary_mode=rotary_mode, shape=tuple(r1.shape))
        if rotary_mode == "half":
            first, second = x.chunk(2, -1)
            turned = torch.cat((-second, first), -1)
        else:
            assert rotary_mode == "interleave"
            turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return r1 * x + r2 * turned

    def npu_swiglu(self, x: Tensor, dim: int = -1) -> Tensor:
        self._note("npu_swiglu", dim=dim)
        gate, up = x.chunk(2, dim)
        return torch.nn.functional.silu(gate) * up

    def npu_fusion_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_num: int,
        input_layout: str,
        pse: Tensor | None = None,
        padding_mask: Tensor | None = None,
        atten_mask: Tensor | None = None,
        scale: float = 1.0,
        keep_prob: float = 1.0,
        pre_tockens: int = FAR,
        next_tockens: int = FAR,
        inner_precise: int = 0,
        prefix: list[int] | None = None,
        actual_seq_qlen: list[int] | None = None,
        actual_seq_kvlen: list[int] | None = None,
        sparse_mode: int = 0,
        gen_mask_parallel: bool = True,
        sync: bool = False,
    ) -> tuple[Any, ...]:
        assert input_layout == "TND"
        assert head_num == query.shape[1]
        assert head_num % key.shape[1] == 0
        assert key.shape == value.shape
        assert query.shape[-1] % 16 == 0
        assert query.dtype in (torch.float16, torch.bfloat16)
        assert actual_seq_qlen is not None
        assert actual_seq_kvlen is not None
        assert actual_seq_qlen[-1] == query.shape[0]
        assert actual_seq_kvlen[-1] == key.shape[0]
        if sparse_mode:
            assert atten_mask is not None
            assert atten_mask.shape == (2048, 2048)
            assert atten_mask.dtype is torch.bool
            assert not atten_mask[5, 5]
            assert atten_mask[5, 6]
        self._note(
            "npu_fusion_attention",
            sparse_mode=sparse_mode,
            pre_tockens=pre_tockens,
            next_tockens=next_tockens,
            actual_seq_qlen=actual_seq_qlen,
            actual_seq_kvlen=actual_seq_kvlen,
        )
        group = head_num // key.shape[1]
        parts = []
        bounds = [
            list(itertools.pairwise([0, *ends])) for ends in (actual_seq_qlen, actual_seq_kvlen)
        ]
        for (q0, q1), (k0, k1) in zip(*bounds, strict=True):
            q = query[q0:q1].float().transpose(0, 1)
            k, v = (
                t[k0:k1].float().transpose(0, 1).repeat_interleave(group, 0) for t in (key, value)
            )
            scores = product(q, k.transpose(1, 2)) * scale
            own = torch.arange(k1 - k0 - (q1 - q0), k1 - k0).unsqueeze(1)  # lower right corner
            other = torch.arange(k1 - k0)
            seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
            if sparse_mode == 3:
                seen = other <= own
            elif sparse_mode == 4:
                seen = (other <= own + next_tockens) & (other >= own - pre_tockens)
            else:
                assert sparse_mode == 0
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            parts.append(product(weights, v).transpose(0, 1))
        return torch.cat(parts).to(query.dtype), None, None, None, 0, 0, 0

    def npu_grouped_matmul(
        self,
        x: list[Tensor],
        weight: list[Tensor],
        *,
        bias: Any = None,
        group_list: Tensor | None = None,
        split_item: int = 0,
        group_type: int = -1,
        group_list_type: int = 0,
    ) -> list[Tensor]:
        assert len(x) == len(weight) == 1
        assert bias is None
        assert split_item in (2, 3)
        assert group_list_type == 1
        assert group_list is not None
        assert group_list.dtype is torch.int64
        self._note("npu_grouped_matmul", group_type=group_type)
        sizes = group_list.tolist()
        with torch.no_grad():  # it has no gradient
            if group_type == 0:  # rows of x, weight (E, in, out)
                assert weight[0].dim() == 3
                runs = x[0].split(sizes)
                return [torch.cat([product(run, weight[0][e]) for e, run in enumerate(runs)])]
            assert group_type == 2  # what is summed over: x (out, T), weight (T, in)
            columns, rows = x[0].split(sizes, dim=1), weight[0].split(sizes)
            return [torch.stack([product(a, b) for a, b in zip(columns, rows, strict=True)])]
