"""Where each millisecond of a step goes, operator by operator, and what a faster step would need.

Every part of a step is set beside the least it could take on this chip: products and attention at
the rate of the best large product, the optimizer at the rate of a large copy, everything else
nothing, as it could hide behind them. Both rates are measured in the same run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tutti.accelerator import Accelerator
from tutti.models.flops import attention_flops_per_token, flops_per_token
from tutti.models.spec import ModelSpec
from tutti.plan.job import Job

REPEATS = 10
# What a kernel (on a device) or an operator (on the host) belongs to; the first that matches.
KINDS: Mapping[str, re.Pattern[str]] = {
    "attention": re.compile(
        r"attention|flash|fmha|sdpa|cudnn_generated_fort|^forward$|^backward_(keys|queries)$",
        re.IGNORECASE,
    ),
    "products": re.compile(r"nvjet|gemm|cutlass|::(add)?b?mm\b|::linear\b", re.IGNORECASE),
    "optimizer": re.compile(r"adam", re.IGNORECASE),
    "copies": re.compile(r"memcpy|memset|::copy_|copy_kernel|direct_copy", re.IGNORECASE),
    "cross-entropy": re.compile(
        r"_whole_rows|_statistics|_gradients|softmax|nll_loss", re.IGNORECASE
    ),
    "norm, rotary, gate": re.compile(
        r"^_forward$|^_backward$|_rotate|_place|_gated_|rms_norm|::silu|::mul\b|::rsqrt",
        re.IGNORECASE,
    ),
    "embedding": re.compile(r"embedding|index_", re.IGNORECASE),
}
OTHER, IDLE = "all else", "chip idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What this chip can do at best, as measured."""

    flops: float  # of a large product, per second
    bytes: float  # of a large copy, per second, read and written


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One kind of work of a step."""

    name: str
    seconds: float
    least_s: float  # at the chip's best rates


def kind_of(name: str) -> str:
    """Return what a kernel or operator belongs to."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), OTHER)


def kernel_seconds(run: Callable[[], object], accelerator: Accelerator) -> dict[str, float]:
    """Run a step once under torch's profiler; return the chip's seconds by kind of work.

    On the host these are the operators' own seconds. Idle is what the step lasts beyond them.
    """
    from torch.profiler import ProfilerActivity, profile

    on_host = accelerator.device.type == "cpu"
    kinds = [ProfilerActivity.CPU]
    if not on_host:
        name = accelerator.device.type.upper()
        kinds = [getattr(ProfilerActivity, name, ProfilerActivity.PrivateUse1)]
    accelerator.synchronize()
    begin = time.perf_counter()
    with profile(activities=kinds) as seen:
        begin = time.perf_counter()
        run()
        accelerator.synchronize()
        elapsed = time.perf_counter() - begin
    seconds: dict[str, float] = {}
    for event in seen.key_averages():
        own = event.self_cpu_time_total if on_host else event.self_device_time_total
        if own > 0:
            kind = kind_of(event.key)
            seconds[kind] = seconds.get(kind, 0.0) + own * 1e-6
    seconds[IDLE] = max(0.0, elapsed - sum(seconds.values()))
    return seconds


def best_rates(accelerator: Accelerator, dtype: torch.dtype) -> Rates:
    """Measure a large product and a large copy."""
    size = 1024 if accelerator.device.type == "cpu" else 8192
    a = torch.randn(size, size, device=accelerator.device).to(dtype)
    out = torch.empty_like(a)
    product = _least(lambda: torch.mm(a, a, out=out), accelerator)
    source = torch.empty(size * size * 4, dtype=dtype, device=accelerator.device)
    target = torch.empty_like(source)
    copy = _least(lambda: target.copy_(source), accelerator)
    return Rates(
        flops=2.0 * size**3 / product,
        bytes=2.0 * source.numel() * source.element_size() / copy,
    )


def _least(work: Callable[[], object], accelerator: Accelerator) -> float:
    seconds = []
    for _ in range(3):
        work()
    for _ in range(REPEATS):
        accelerator.synchronize()
        begin = time.perf_counter()
        for _ in range(4):
            work()
        accelerator.synchronize()
        seconds.append((time.perf_counter() - begin) / 4)
    return min(seconds)


def parts(
    seconds: Mapping[str, float],
    spec: ModelSpec,
    job: Job,
    rates: Rates,
) -> list[Part]:
    """Return what a step spends, the largest first, beside the least that it could."""
    pairs = attention_flops_per_token(spec, job.sequence_length)
    products = (flops_per_token(spec, job.sequence_length) - 6.0 * pairs) * job.tokens
    # forward has two products per pair, backward four, and one more to have the scores again
    attention = 7.0 * pairs * job.tokens / 2.0
    every = (p for unit in range(spec.num_units) for p in spec.parameters(unit))
    parameters = sum(p.size for p in every if p.trainable)
    least = {
        "products": products / rates.flops,
        "attention": attention / rates.flops,
        "optimizer": parameters * job.update_bytes / rates.bytes,
    }
    listed = [
        Part(name=name, seconds=value, least_s=least.get(name, 0.0))
        for name, value in seconds.items()
    ]
    return sorted(listed, key=lambda part: -part.seconds)


def needed(listed: list[Part], mfu: float, target: float) -> str:
    """Say what of a step would have to go for a target, and how far the chip could go at all."""
    step = sum(part.seconds for part in listed)
    least = sum(part.least_s for part in listed)
    due = step * (1.0 - mfu / target)
    ceiling = mfu * step / least if least else float("inf")
    if due <= 0:
        return f"MFU {target:g} is reached; at the chip's best rates it would be {ceiling:.3f}"
    savings = sorted(listed, key=lambda part: part.least_s - part.seconds)
    words = [
        f"{part.name} {max(0.0, part.seconds - part.least_s) * 1e3:.1f} ms"
        for part in savings[:4]
        if part.seconds > part.least_s
    ]
    return (
        f"MFU {target:g} needs a step {due * 1e3:.1f} ms shorter; above the chip's best rates "
        f"are: {', '.join(words)}; with none of it the MFU would be {ceiling:.3f}"
    )
