"""`tutti bench operators`: each operator as the device runs it beside its plain torch composition.

Shapes are those of a model at a number of tokens; forward and backward together. The composition is
what people write by hand: separate kernels, logits held as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tutti.accelerator.accelerator import Accelerator
from tutti.accelerator.operators import Operators
from tutti.accelerator.reference import norm as plain_norm
from tutti.accelerator.registry import implementations
from tutti.accelerator.segments import Segments
from tutti.accelerator.timing import Timed, side_by_side
from tutti.models.parts import Activation, BlockSpec
from tutti.models.spec import ModelSpec

EPS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """One operator on one shape."""

    model: str
    operator: str
    shape: str
    implementation: str
    plain: Timed
    ours: Timed
    others: dict[str, float]  # seconds of the other implementations

    @property
    def speedup(self) -> float:
        """How many times faster than the composition."""
        return self.plain.seconds / self.ours.seconds

    @property
    def memory_share(self) -> float | None:
        """Peak memory as a part of the composition's, where the device counts it."""
        return self.ours.peak_bytes / self.plain.peak_bytes if self.plain.peak_bytes else None


@dataclass(frozen=True, slots=True)
class BenchCase:
    """An operator's call, the same as a composition, and the tensors to differentiate by."""

    operator: str
    shape: str
    call: Callable[[Operators], Any]
    plain: Callable[[], Any]
    leaves: tuple[Tensor, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


def both_ways(function: Callable[[], Any], leaves: tuple[Tensor, ...]) -> Callable[[], Any]:
    """Return a function that runs forward, and backward from gradients of ones."""
    ones: list[Tensor] = []

    def run() -> Any:
        result = function()
        outputs = [result] if isinstance(result, Tensor) else list(result)
        outputs = [o for o in outputs if o.requires_grad]
        if not ones:
            ones.extend(torch.ones_like(o) for o in outputs)
        return torch.autograd.grad(outputs, leaves, ones, allow_unused=True)

    return run


class Cases:
    """The calls that a model of some shape makes."""

    def __init__(
        self, spec: ModelSpec, tokens: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec, self.tokens, self.length = spec, tokens, length
        self.options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.block: BlockSpec = spec.blocks[0]

    def _leaf(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, **self.options) * scale).requires_grad_()

    def __iter__(self) -> Iterator[BenchCase]:
        yield self.norm()
        yield self.rotary()
        yield self.gated()
        yield self.attention()
        yield self.head()

    def norm(self) -> BenchCase:
        """RMSNorm of the sum of two tensors."""
        width = self.spec.hidden
        x, residual = self._leaf(self.tokens, width), self._leaf(self.tokens, width)
        weight = self._leaf(width)
        args = (x, residual, weight)
        return BenchCase(
            "add_rms_norm", f"{self.tokens} × {width}",
            lambda ops: ops.add_rms_norm(x, residual, weight, eps=EPS),
            lambda: plain_norm.add_rms_norm(x, residual, weight, eps=EPS),
            args, args, {"eps": EPS},
        )  # fmt: skip

    def rotary(self) -> BenchCase:
        """Rotary positions of the queries, out of a fused product."""
        attention = self.block.attention
        heads, width = attention.heads, attention.head_dim
        fused = self._leaf(self.tokens, (heads + 2 * attention.kv_heads) * width)
        x = fused[:, : heads * width].view(self.tokens, heads, width)
        cos, sin = (torch.randn(self.tokens, width // 2, **self.options) for _ in range(2))

        def plain() -> Tensor:
            both_cos, both_sin = (torch.cat((t, t), -1).unsqueeze(1) for t in (cos, sin))
            first, second = x.chunk(2, -1)
            return x * both_cos + torch.cat((-second, first), -1) * both_sin

        return BenchCase(
            "rotary", f"{self.tokens} × {heads} × {width}",
            lambda ops: ops.rotary(x, cos, sin), plain, (x,), (x, cos, sin), {},
        )  # fmt: skip

    def gated(self) -> BenchCase:
        """The gated activation of a fused product."""
        width = self.block.mlp.hidden if self.block.mlp else self.spec.hidden * 4
        x = self._leaf(self.tokens, 2 * width)

        def plain() -> Tensor:
            gate, up = x.chunk(2, -1)
            return functional.silu(gate) * up

        return BenchCase(
            "gated_activation", f"{self.tokens} × {width}",
            lambda ops: ops.gated_activation(x, kind=Activation.SILU), plain, (x,), (x,),
            {"kind": Activation.SILU},
        )  # fmt: skip

    def attention(self) -> BenchCase:
        """Causal attention; the composition is torch's own choice of back end."""
        spec = self.block.attention
        q, k, v = (
            self._leaf(self.tokens, heads, spec.head_dim)
            for heads in (spec.heads, spec.kv_heads, spec.kv_heads)
        )
        segments = Segments.batch(self.tokens // self.length, self.length)
        scale = spec.softmax_scale

        def plain() -> Tensor:
            queries, keys, values = (
                t.view(-1, self.length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v)
            )
            return functional.scaled_dot_product_attention(
                queries,
                keys,
                values,
                is_causal=True,
                scale=scale,
                enable_gqa=spec.heads != spec.kv_heads,
            )

        return BenchCase(
            "attention",
            f"{self.tokens // self.length} × {self.length}, {spec.heads}/{spec.kv_heads} × "
            f"{spec.head_dim}",
            lambda ops: ops.attention(q, k, v, segments, scale=scale), plain, (q, k, v),
            (q, k, v, segments), {"scale": scale},
        )  # fmt: skip

    def head(self) -> BenchCase:
        """Logits and cross-entropy."""
        x = self._leaf(self.tokens, self.spec.hidden)
        weight = self._leaf(self.spec.vocab, self.spec.hidden, scale=self.spec.hidden**-0.5)
        targets = torch.randint(self.spec.vocab, (self.tokens,), device=self.options["device"])

        def plain() -> Tensor:
            return functional.cross_entropy((x @ weight.t()).float(), targets, reduction="sum")

        def ours(ops: Operators) -> Tensor:
            return ops.linear_cross_entropy(x, weight, targets, starts_backward=True)[0]

        return BenchCase(
            "linear_cross_entropy", f"{self.tokens} × {self.spec.hidden} × {self.spec.vocab}",
            ours, plain, (x, weight), (x, weight, targets), {},
        )  # fmt: skip


def measure(
    accelerator: Accelerator,
    spec: ModelSpec,
    *,
    tokens: int,
    length: int,
    dtype: torch.dtype,
    rounds: int = 20,
) -> Iterator[OperatorRow]:
    """Yield a row per operator."""
    kind = accelerator.device.type
    for case in Cases(spec, tokens, length, dtype, accelerator.device):
        chosen = accelerator.operators.chosen(case.operator, *case.args, **case.options)
        functions = {"plain": both_ways(case.plain, case.leaves)}
        for candidate in implementations(case.operator, kind):
            if candidate.name == "reference" and candidate.name != chosen.name:
                continue  # scores or logits as a whole: what `plain` stands for
            if candidate.supports(*case.args, **case.options) is None:
                forced = Operators(kind, forced={case.operator: candidate.name})
                functions[candidate.name] = both_ways(
                    lambda call=case.call, ops=forced: call(ops),  # type: ignore[misc]
                    case.leaves,
                )
        times = side_by_side(accelerator, functions, rounds=rounds)
        yield OperatorRow(
            model=spec.name,
            operator=case.operator,
            shape=case.shape,
            implementation=chosen.name,
            plain=times["plain"],
            ours=times[chosen.name],
            others={
                name: timed.seconds
                for name, timed in times.items()
                if name not in ("plain", chosen.name)
            },
        )
