"""What attention costs with and without windows, beside what the chip's shipped profile says.

python benchmarks/attention_windows.py

Of each model's layers: milliseconds of the forward and the backward pass at some lengths, the
window as it is, and the prices of them.
"""

from __future__ import annotations

import torch
from triton.testing import do_bench

from tutti.accelerator.find import open_accelerator
from tutti.accelerator.segments import Segments
from tutti.cost.arrays import Strategy
from tutti.cost.measured.calls import unit_calls
from tutti.cost.measured.chip import MeasuredChip
from tutti.hardware.chip import Dtype
from tutti.hardware.profile import shipped_profile
from tutti.models.load import load_model
from tutti.models.parts import AttentionSpec
from tutti.models.spec import ModelSpec

MODELS = ("gpt-oss-20b", "phi-3-mini", "gemma-2-2b", "gemma-3-1b", "olmo-3-7b", "llama-3.1-8b")
BATCHES = ((4, 2048), (2, 4096), (1, 8192), (1, 2048))


def layers(spec: ModelSpec) -> dict[int | None, int]:
    """Return a unit of each window."""
    units = reversed(range(1, spec.head_unit))
    return {spec.block(unit).attention.window: unit for unit in units}


def measured(part: AttentionSpec, sequences: int, length: int) -> tuple[float, float]:
    """Return the milliseconds of both passes on this chip."""
    operators = open_accelerator("cuda").operators
    tokens = sequences * length

    def some(heads: int, width: int) -> torch.Tensor:
        return torch.randn(
            tokens, heads, width, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )

    q = some(part.heads, part.head_dim)
    k, v = some(part.kv_heads, part.head_dim), some(part.kv_heads, part.value_dim)
    sinks = torch.zeros(part.heads, device="cuda", dtype=torch.bfloat16) if part.sinks else None

    def run() -> torch.Tensor:
        return operators.attention(
            q, k, v, Segments.batch(sequences, length), scale=part.head_dim**-0.5,
            window=part.window, soft_cap=part.soft_cap, sinks=sinks,
        )  # fmt: skip

    y = run()
    gradient = torch.randn_like(y)
    back = do_bench(
        lambda: torch.autograd.grad(y, (q, k, v), gradient, retain_graph=True), warmup=5, rep=20
    )
    return float(do_bench(run, warmup=5, rep=20)), float(back)


def priced(spec: ModelSpec, unit: int, sequences: int, length: int) -> tuple[float, float]:
    """Return the milliseconds of both passes by the profile that ships."""
    name = open_accelerator("cuda").chip
    profile = shipped_profile(name)
    assert profile is not None, "a profile ships of this chip"
    chip = MeasuredChip(profile, Dtype.BF16)
    strategy = Strategy.filled(sequence_length=length, sequences=sequences)
    call = next(
        call for call in unit_calls(spec, unit, strategy) if call.operator.endswith("attention")
    )
    forward = chip.seconds(call.operator, "forward", call.dims)
    backward = chip.seconds(call.operator, "backward", call.dims)
    return 1e3 * forward.item(), 1e3 * backward.item()


def main() -> None:
    for model in MODELS:
        spec = load_model(model)
        for window, unit in layers(spec).items():
            for sequences, length in BATCHES:
                true = measured(spec.block(unit).attention, sequences, length)
                said = priced(spec, unit, sequences, length)
                print(
                    f"{model}, window {window or '–'}, {sequences} × {length}: forward "
                    f"{true[0]:.3f} ms (priced {said[0]:.3f}, {said[0] / true[0] - 1.0:+.0%}), "
                    f"backward {true[1]:.3f} ({said[1]:.3f}, {said[1] / true[1] - 1.0:+.0%})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
