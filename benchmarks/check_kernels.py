"""Every CUDA implementation against the float64 reference, quickly: forward and gradients.

    PYTHONPATH=src python benchmarks/check_kernels.py

`tutti accelerator check --device cuda` is the whole kit; this prints one line per kernel and dtype
while kernels are being written.
"""

from __future__ import annotations

import torch

from tutti.accelerator import Segments, open_accelerator
from tutti.accelerator.operators import Operators
from tutti.accelerator.registry import REFERENCES, implementations
from tutti.models.parts import Activation


def leaves(dtype, *shapes):
    return [torch.randn(s, device="cuda").to(dtype).requires_grad_() for s in shapes]


def compare(operator, tensors, extra=(), **options):
    """Print the relative error of each implementation's outputs and gradients."""
    exact = [t.detach().cpu().double().requires_grad_() for t in tensors]
    host = [e.cpu() if isinstance(e, torch.Tensor) else e for e in extra]
    expected = run(REFERENCES[operator], exact, host, options)
    for candidate in implementations(operator, "cuda"):
        reason = candidate.supports(*tensors, *extra, **options)
        if reason:
            print(f"{operator:22} {candidate.name:10} {tensors[0].dtype} -- {reason}")
            continue
        ops = Operators("cuda", forced={operator: candidate.name})
        found = run(getattr(ops, operator), tensors, extra, options)
        errors = [
            ((f.cpu().double() - e).norm() / e.norm().clamp_min(1e-30)).item()
            for f, e in zip(found, expected, strict=True)
        ]
        print(f"{operator:22} {candidate.name:10} {tensors[0].dtype} "
              + " ".join(f"{e:.1e}" for e in errors))  # fmt: skip


def run(function, tensors, extra, options):
    result = function(*tensors, *extra, **options)
    outputs = [result] if isinstance(result, torch.Tensor) else list(result)
    outputs = [o for o in outputs if o.requires_grad]
    torch.manual_seed(1)
    seeds = [torch.randn(o.shape, dtype=torch.float64).to(o) for o in outputs]
    if outputs[0].dim() == 0:
        seeds = [torch.ones_like(o) for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, tensors, seeds)]


def main():
    print(open_accelerator())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        for width in (1024, 4096, 1000):
            x, r, w = leaves(dtype, (333, width), (333, width), (width,))
            compare("rms_norm", [x, w], eps=1e-5)
            compare("add_rms_norm", [x, r, w], eps=1e-5, unit_offset=True)
        (q,) = leaves(dtype, (77, 8, 96))
        cos, sin = (torch.randn(77, 32, device="cuda").to(dtype) for _ in range(2))
        compare("rotary", [q], (cos, sin), interleaved=True)
        compare("rotary", [q], (cos, sin))
        for kind in (Activation.SILU, Activation.GELU_TANH, Activation.CLAMPED_SWIGLU):
            compare("gated_activation", leaves(dtype, (300, 2 * 1000)), kind=kind)
        x, w = leaves(dtype, (700, 512), (32000, 512))
        w = (w.detach() * 0.05).requires_grad_()
        targets = torch.randint(-1, 32000, (700,), device="cuda")
        compare("linear_cross_entropy", [x, w], (targets,), soft_cap=30.0, divisor=2.0)
        compare("linear_cross_entropy", [x, w], (targets,))
        for segments in (Segments.batch(2, 256), Segments.of_lengths([100, 256, 156])):
            qkv = leaves(dtype, (512, 8, 64), (512, 2, 64), (512, 2, 64))
            compare("attention", qkv, (segments,), scale=0.125)
            compare("attention", qkv, (segments,), scale=0.125, window=50)
        counts = torch.tensor([100, 0, 300, 56], device="cuda")
        compare("grouped_linear", leaves(dtype, (456, 256), (4, 512, 256)), (counts,))


if __name__ == "__main__":
    main()
