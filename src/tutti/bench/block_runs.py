"""Transformer blocks to time: ours, ours compiled, and the one of Hugging Face, on one device."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tutti.accelerator.accelerator import Accelerator
from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.profiling.cases import ProfileCase, prepare
from tutti.accelerator.profiling.timer import Samples, Timer
from tutti.accelerator.profiling.workspace import TORCH_DTYPES, Workspace
from tutti.hardware.chip import Dtype
from tutti.hardware.profile import Profile
from tutti.models import read_config
from tutti.models.flops import attention_flops_per_token
from tutti.models.load import load_model
from tutti.models.spec import ModelSpec
from tutti.nn import Batch, build_unit
from tutti.nn.build import Unit

if TYPE_CHECKING:
    from torch import Tensor

# Blocks for a host: hidden, heads, kv heads, feed-forward width, sequences, length.
HOST_SHAPES: Mapping[str, tuple[int, int, int, int, int, int]] = {
    "llama-256": (256, 4, 2, 704, 2, 256),
    "llama-320": (320, 5, 5, 896, 1, 768),
    "llama-448": (448, 7, 1, 1216, 2, 320),
    "llama-512": (512, 8, 4, 1408, 1, 512),
    "llama-704": (704, 11, 11, 1920, 1, 640),
    "llama-768": (768, 12, 4, 2048, 1, 1024),
    "llama-960": (960, 15, 5, 2560, 1, 448),
    "llama-1024": (1024, 16, 8, 2816, 2, 512),
}
SUMMED = "tutti, summed"  # who runs as a step of several micro-batches does
IN_A_ROW = 8
ANCHORS = 5
DEVICE_MODELS = ("llama-3-8b", "llama-3.2-3b", "llama-3.2-1b")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """A model's block at a micro-batch."""

    name: str
    spec: ModelSpec
    config: Mapping[str, Any] | None  # as Hugging Face writes it; None: it cannot be built there
    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        """Of the micro-batch."""
        return self.sequences * self.length

    @property
    def flops(self) -> float:
        """Model FLOPs of forward and backward (DESIGN.md §5: attention not halved)."""
        weights = sum(p.activated_size * p.matmul_uses for p in self.spec.parameters(1))
        attention = attention_flops_per_token(self.spec, self.length) / self.spec.num_layers
        return 6.0 * self.tokens * (weights + attention)


def host_shapes() -> list[BlockShape]:
    """Return small Llama blocks for a host."""
    shapes = []
    for name, (hidden, heads, kv_heads, width, sequences, length) in HOST_SHAPES.items():
        config = _llama_config(hidden, heads, kv_heads, width)
        spec = read_config(config, name)
        shapes.append(
            BlockShape(name=name, spec=spec, config=config, sequences=sequences, length=length)
        )
    return shapes


def model_shapes(names: Sequence[str], sequences: int, length: int) -> list[BlockShape]:
    """Return the first blocks of models."""
    shapes = []
    for name in names:
        spec = load_model(name)
        shapes.append(
            BlockShape(
                name=name,
                spec=spec,
                config=_config_of(spec) if spec.model_type == "llama" else None,
                sequences=sequences,
                length=length,
            )
        )
    return shapes


def _config_of(spec: ModelSpec) -> dict[str, Any] | None:
    block = spec.block(1)
    if block.mlp is None:
        return None
    part = block.attention
    config = _llama_config(spec.hidden, part.heads, part.kv_heads, block.mlp.hidden)
    return config | {"head_dim": part.head_dim}


def _llama_config(hidden: int, heads: int, kv_heads: int, width: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "num_hidden_layers": 2,
        "vocab_size": 1024,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


@dataclass(slots=True, kw_only=True)
class BlockRun:
    """One implementation of one block: what is timed, and the samples of it."""

    who: str
    shape: BlockShape
    forward: Callable[[], Any]
    step: Callable[[], Any]  # forward and backward
    forward_samples: Samples = field(default_factory=Samples)
    step_samples: Samples = field(default_factory=Samples)

    @property
    def forward_s(self) -> float:
        """The median forward pass."""
        return self.forward_samples.median

    @property
    def backward_s(self) -> float:
        """What backward adds to it."""
        return self.step_samples.median - self.forward_samples.median

    @property
    def step_s(self) -> float:
        """The median of both passes."""
        return self.step_samples.median


def our_run(
    shape: BlockShape, accelerator: Accelerator, dtype: Dtype, *, compiled: bool = False
) -> BlockRun:
    """Return our block, with random weights."""
    block, batch, x = _our_block(shape, accelerator, dtype)
    function: Callable[..., Any] = block
    if compiled:
        function = accelerator.compile(block)
    name = "tutti compiled" if compiled else "tutti"
    return _run(name, shape, block, lambda: function(x, batch)[0], x)


def summed_run(shape: BlockShape, accelerator: Accelerator, dtype: Dtype) -> BlockRun:
    """Return our block as a step of several micro-batches runs it: gradients go onto wide sums."""
    block, batch, x = _our_block(shape, accelerator, dtype)
    sums = {id(p): torch.zeros_like(p, dtype=torch.float32) for p in block.parameters()}
    later = WeightGradients()
    small = [p for p in block.parameters() if p.requires_grad and p.dim() == 1]
    gradient = torch.randn_like(x)

    def forward() -> Tensor:
        y: Tensor = block(x, batch, later)[0]
        return y

    def step() -> None:
        _, *rest = torch.autograd.grad(forward(), [x, *small], gradient, allow_unused=True)
        later.run(lambda weight: sums[id(weight)])
        with torch.no_grad():
            for parameter, slope in zip(small, rest, strict=True):
                if slope is not None:
                    sums[id(parameter)].add_(slope)

    return BlockRun(who=SUMMED, shape=shape, forward=forward, step=step)


def _our_block(
    shape: BlockShape, accelerator: Accelerator, dtype: Dtype
) -> tuple[Unit, Batch, Tensor]:
    kind, device = TORCH_DTYPES[_around(dtype)], accelerator.device
    operators = accelerator.operators
    operators = operators.narrowed() if dtype is Dtype.FP8 else operators
    block = build_unit(shape.spec, 1, operators, dtype=kind, device=device)
    _fill(block)
    tokens = torch.zeros(shape.tokens, dtype=torch.long, device=device)
    batch = Batch.of(shape.spec, tokens, [shape.length] * shape.sequences)
    x = torch.randn(shape.tokens, shape.spec.hidden, device=device, dtype=kind).requires_grad_()
    return block, batch, x


def hugging_face_run(shape: BlockShape, accelerator: Accelerator, dtype: Dtype) -> BlockRun | None:
    """Return the decoder layer of transformers on the same shape, with its best attention."""
    if shape.config is None:
        return None
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    kind, device = TORCH_DTYPES[_around(dtype)], accelerator.device
    values = {name: value for name, value in shape.config.items() if name != "model_type"}
    config = LlamaConfig(**values, attention_bias=False)
    config._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(config, layer_idx=0).to(device=device, dtype=kind).train()
    _fill(layer)
    sizes = (shape.sequences, shape.length, shape.spec.hidden)
    x = torch.randn(sizes, device=device, dtype=kind).requires_grad_()
    positions = torch.arange(shape.length, device=device).unsqueeze(0)
    with torch.no_grad():
        turned = LlamaRotaryEmbedding(config).to(device)(x, positions)

    def forward() -> Tensor:
        y = layer(x, position_embeddings=turned, position_ids=positions)
        output: Tensor = y[0] if isinstance(y, tuple) else y
        return output

    return _run("transformers", shape, layer, forward, x)


def _around(dtype: Dtype) -> Dtype:
    """Return what stands around products: of 8 bits bf16."""
    return Dtype.BF16 if dtype is Dtype.FP8 else dtype


def _fill(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.02 if parameter.dim() > 1 else 1.0)


def _run(
    who: str,
    shape: BlockShape,
    module: torch.nn.Module,
    forward: Callable[[], Tensor],
    x: Tensor,
) -> BlockRun:
    inputs = [x, *(p for p in module.parameters() if p.requires_grad)]
    gradient = torch.randn_like(forward())

    def step() -> Any:
        return torch.autograd.grad(forward(), inputs, gradient)

    return BlockRun(who=who, shape=shape, forward=forward, step=step)


@dataclass(slots=True, kw_only=True)
class Anchor:
    """A product that the profile measured, timed again beside the blocks."""

    run: Callable[[], Any]
    calls: int
    profiled_s: float
    samples: Samples = field(default_factory=Samples)


def anchors_of(
    profile: Profile, accelerator: Accelerator, dtype: Dtype, timer: Timer
) -> list[Anchor]:
    """Return a few products of middling length, to tell how fast the machine is just now."""
    dtype = _around(dtype)
    rows = [r for r in profile.operators if r.operator == "linear.forward" and r.dtype is dtype]
    wanted = 1e-3 if timer.issues else 1e-2
    rows = sorted(rows, key=lambda r: (abs(math.log(r.seconds / wanted)), r.shape))[:ANCHORS]
    workspace = Workspace(accelerator, dtype)
    return [
        Anchor(
            run=prepare(ProfileCase("linear", row.shape), workspace, accelerator.operators).runs[
                "forward"
            ],
            calls=timer.calls_for(row.seconds),
            profiled_s=row.seconds,
        )
        for row in rows
    ]


def drift(anchors: Sequence[Anchor], last: int | None = None) -> float:
    """Return how much longer things take now than when the profile was made: 1 is as then.

    With `last`, by so many samples of each, its last.
    """
    return statistics.median(
        statistics.median(a.samples.seconds[-(last or 0) :]) / a.profiled_s for a in anchors
    )


def time_runs(
    runs: Sequence[BlockRun], timer: Timer, rounds: int, anchors: Sequence[Anchor] = ()
) -> None:
    """Take samples of all runs in turns; on a device a sample is several blocks in a row.

    The host issues them as it does in training: where it is slower than the device, that shows.
    """
    calls = IN_A_ROW if timer.issues else 1
    for anchor in anchors:
        anchor.run()
    for run in runs:
        for _ in range(3 if timer.issues else 1):
            run.step()
    for _ in range(rounds):
        for run in runs:
            timer.sample(run.forward, calls, run.forward_samples, ahead=False)
            timer.sample(run.step, calls, run.step_samples, ahead=False)
        for anchor in anchors:
            timer.sample(anchor.run, anchor.calls, anchor.samples)
