"""The constants of the cost model: their registry, and one set of values for all of them.

Unit, prior, bounds, meaning and source of every constant stand in `constants.yaml`; `Constants`
holds a value of each, the prior where nobody calibrated it. Which constants a software stack frees
is the calibration's business.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt

from tutti import document, files
from tutti.document import Above, Place

FloatArray = npt.NDArray[np.float64]
Value = float | FloatArray
"""A number, or one number per strategy."""

_FILE = "constants.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantSpec:
    """What one constant means, and what is believed of it before anything was measured."""

    unit: str
    prior: Annotated[float, Above(0)]  # the median
    sigma: Annotated[float, Above(0)]  # of the logarithm
    low: Annotated[float, Above(0)]
    high: Annotated[float, Above(0)]
    scope: Literal["compute", "cluster"]
    meaning: str
    source: str

    def __post_init__(self) -> None:
        if not self.low <= self.prior <= self.high:
            raise ValueError(f"'prior' {self.prior:g} is not in [{self.low:g}, {self.high:g}]")


@functools.lru_cache(maxsize=1)
def registry() -> Mapping[str, ConstantSpec]:
    """Return every constant's specification, in the order of the file."""
    text = resources.files("tutti.cost").joinpath(_FILE).read_text(encoding="utf-8")
    return document.build(dict[str, ConstantSpec], files.parse_yaml(text, _FILE), Place(_FILE))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Constants:
    """One value of every constant, by default its prior; `constants.yaml` says what they mean."""

    gemm_efficiency: Value = 0.85
    gemm_fill_s: Value = 3.5e-06
    wave_quantisation: Value = 0.9
    misaligned_slowdown: Value = 3.0
    hbm_efficiency: Value = 0.8
    elementwise_scale: Value = 1.0
    kernel_gap_s: Value = 4e-06
    host_layer_s: Value = 0.0005
    host_tp_s: Value = 5e-05
    host_head_s: Value = 0.0015
    host_step_s: Value = 0.005
    flash_efficiency: Value = 0.42
    flash_backward_ratio: Value = 0.8
    flash_head_dim: Value = 14.0
    unfused_attention_scale: Value = 1.0
    logit_bytes: Value = 40.0
    optimizer_bytes: Value = 40.0
    fp8_speedup: Value = 1.75
    fp8_cast_bytes: Value = 6.0
    fp8_rowwise_factor: Value = 3.0
    fp4_speedup: Value = 3.0
    compile_scale: Value = 0.7
    moe_host_s: Value = 0.0005
    moe_gemm_ratio: Value = 0.8
    link_efficiency: Value = 0.78
    link_latency_s: Value = 4.5e-05
    nic_efficiency: Value = 0.8
    nic_latency_s: Value = 2e-05
    dp_overlap: Value = 0.3
    p2p_exposure: Value = 0.5
    overlap_slowdown: Value = 0.15
    node_jitter: Value = 0.01
    async_tp_hidden: Value = 0.5
