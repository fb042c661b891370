"""Attention through torch_npu's fused kernel, on packed sequences.

As documented for torch_npu 7: `npu_fusion_attention(query, key, value, head_num, input_layout, …)`
takes packed tokens as "TND" with the cumulative lengths of queries and keys on the host; in
`atten_mask` true means hidden. `sparse_mode` 3 is causal from the lower right corner, where the
last query sits on the last key, as our segments have it; 4 is a band, `pre_tockens` to the left and
`next_tockens` to the right of the diagonal. Both read one compressed 2048 × 2048 triangle. It has
gradients, summed in any order.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.ascend.pointwise import DEVICES
from tutti.accelerator.registry import Implementation
from tutti.accelerator.segments import Segments

TRIANGLE = 2048
ALL, CAUSAL, BAND = 0, 3, 4  # sparse modes
WIDEST_HEAD, HEAD_STEP = 512, 16
FAR = 2147483647  # the documented default: everything
_triangles: dict[torch.device, Tensor] = {}


def _triangle(device: torch.device) -> Tensor:
    """Return the compressed mask: true, hidden, above the diagonal."""
    if device not in _triangles:
        ones = torch.ones(TRIANGLE, TRIANGLE, dtype=torch.bool)
        _triangles[device] = torch.triu(ones, diagonal=1).to(device)
    return _triangles[device]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    **_options: Any,
) -> Tensor:
    """Return (T, H, D) of q (T, H, D), k and v (S, G, D) within the segments."""
    import torch_npu

    banded = window is not None and window < max(segments.keys)
    mode = BAND if banded else CAUSAL if causal else ALL
    y: Tensor = torch_npu.npu_fusion_attention(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        q.shape[1],
        "TND",
        atten_mask=None if mode == ALL else _triangle(q.device),
        scale=scale,
        pre_tockens=window - 1 if banded and window is not None else FAR,
        next_tockens=0 if mode != ALL else FAR,
        actual_seq_qlen=list(itertools.accumulate(segments.queries)),
        actual_seq_kvlen=list(itertools.accumulate(segments.keys)),
        sparse_mode=mode,
    )[0]
    return y


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    causal: bool = True,
    window: int | None = None,
    window_kind: str = "sliding",
    **options: Any,
) -> str | None:
    """Say why a call is not taken."""
    for name in ("soft_cap", "sinks", "key_bias"):
        if options.get(name) is not None:
            return f"no {name.replace('_', ' ')}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return "float16 and bfloat16 only"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] % HEAD_STEP or q.shape[-1] > WIDEST_HEAD:
        return f"heads of one width, a multiple of {HEAD_STEP}, up to {WIDEST_HEAD}, only"
    if not segments.keys_follow or sum(segments.keys) != k.shape[0]:
        return "keys that follow each other and fill the batch only"
    if window is not None and window < max(segments.keys):
        if window_kind != "sliding":
            return "no chunked windows"
        if not causal or segments.queries != segments.keys:
            return "windows of whole causal sequences only"
    return None


IMPLEMENTATIONS = (
    Implementation(
        operator="attention",
        name="npu",
        function=attention,
        supports=supports,
        devices=DEVICES,
        needs="torch_npu",
        rank=20,
        deterministic=False,
    ),
)
