"""The parts a decoder language model is made of, as facts.

Each class says *what is computed*, completely enough that `nn/` builds the torch module and `cost/`
prices it from here alone. How a Hugging Face `config.json` says it is the families' business; how
large it is, `parameters`' and `operators`'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Literal

from tutti.document import Above, AtLeast, AtMost, Count, Natural

Probability = Annotated[float, AtLeast(0), AtMost(1)]
Positive = Annotated[float, Above(0)]
NotNegative = Annotated[float, AtLeast(0)]


class Activation(StrEnum):
    """The non-linearity of a feed-forward layer."""

    SILU = "silu"
    GELU = "gelu"  # the exact one, with the error function
    GELU_TANH = "gelu_tanh"  # its tanh approximation, under all of its names
    QUICK_GELU = "quick_gelu"  # x · sigmoid(1.702 x)
    RELU = "relu"
    RELU2 = "relu2"
    # gpt-oss: gate clamped from above, up from both sides, then (up + 1) · gate · sigmoid(α·gate)
    CLAMPED_SWIGLU = "clamped_swiglu"


class Placement(StrEnum):
    """Where the norms of a block stand; f is the attention or the feed-forward layer."""

    PRE = "pre"  # x + f(norm(x))
    POST = "post"  # norm(x + f(x))
    BRANCH = "branch"  # x + norm(f(x))
    SANDWICH = "sandwich"  # x + norm(f(norm(x)))


class Residual(StrEnum):
    """Whether the feed-forward layer sees the attention's output."""

    SEQUENTIAL = "sequential"
    PARALLEL_ONE_NORM = "parallel_one_norm"  # x + attention(n) + mlp(n), n = norm(x)
    PARALLEL_TWO_NORMS = "parallel_two_norms"  # x + attention(norm1(x)) + mlp(norm2(x))


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """RMSNorm or LayerNorm over the last dimension."""

    kind: Literal["rms", "layer"] = "rms"
    eps: Positive
    affine: bool = True
    bias: bool = False
    unit_offset: bool = False  # multiplies by 1 + weight (Gemma, Nemotron)

    def __post_init__(self) -> None:
        if self.bias and not (self.affine and self.kind == "layer"):
            raise ValueError("'bias' needs an affine layer norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class QkNormSpec:
    """A norm on queries and keys."""

    norm: NormSpec
    # head: one weight for all heads; heads: each head its own; all: across heads (Olmo 2)
    span: Literal["head", "heads", "all"] = "head"
    after_rotary: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryScaling:
    """How rotary frequencies are stretched for longer contexts.

    `attention_factor` multiplies cos and sin. Everything that transformers derives from other keys
    (mscale, max_position_embeddings ÷ original) is resolved here.
    """

    kind: Literal["linear", "dynamic", "yarn", "longrope", "llama3", "ntk_alpha"]
    factor: Positive = 1.0
    original_length: Count | None = None
    attention_factor: Positive = 1.0
    low_frequency_factor: Positive | None = None  # llama3
    high_frequency_factor: Positive | None = None
    beta_fast: Positive | None = None  # yarn
    beta_slow: Positive | None = None
    truncate: bool = True
    short_factors: tuple[Positive, ...] = ()  # longrope, one per rotated pair
    long_factors: tuple[Positive, ...] = ()
    alpha: Positive | None = None  # ntk_alpha


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec:
    """Rotary positions on the first `dim` dimensions of each head (of the rope part, if latent)."""

    theta: Positive
    dim: Count
    interleaved: bool = False  # pairs (0,1),(2,3)… instead of (0,d/2),(1,d/2+1)…
    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        if self.dim % 2:
            raise ValueError(f"the rotary dimension {self.dim} is odd; it must be even")
        scaling = self.scaling
        for factors in (scaling.short_factors, scaling.long_factors) if scaling else ():
            if factors and len(factors) != self.dim // 2:
                raise ValueError(
                    f"longrope has {len(factors)} factors; the rotary dimension {self.dim} "
                    f"needs {self.dim // 2}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class AlibiSpec:
    """Linear position biases on the attention scores."""

    scaled: bool = False  # added before the softmax scale is applied (Falcon), not after (Bloom)
    bfloat16: bool = False  # the slopes are rounded to bfloat16 (Falcon)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-latent attention: queries and keys/values go through low-rank latents."""

    query_rank: Count | None = None  # None: queries are projected directly
    kv_rank: Count
    nope_dim: Natural
    rope_dim: Count
    value_dim: Count
    norm_eps: Positive = 1e-6  # of the norms on the latents
    bias: bool = False  # on the down projections


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Causal self-attention."""

    heads: Count
    kv_heads: Count
    head_dim: Count  # of queries and keys
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QkNormSpec | None = None
    rotary: RotarySpec | None = None
    alibi: AlibiSpec | None = None
    window: Count | None = None
    window_kind: Literal["sliding", "chunked"] = "sliding"
    soft_cap: Positive | None = None
    sinks: bool = False  # one learned logit per head that takes probability away
    scale: Positive | None = None  # of the scores; None: head_dim ** -0.5
    latent: LatentSpec | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key-value heads; "
                "the second must divide the first"
            )
        latent = self.latent
        rotated = latent.rope_dim if latent else self.head_dim
        if latent is not None and self.head_dim != latent.nope_dim + latent.rope_dim:
            raise ValueError(
                f"'head_dim' is {self.head_dim}; latent attention with {latent.nope_dim} + "
                f"{latent.rope_dim} needs {latent.nope_dim + latent.rope_dim}"
            )
        if self.rotary is not None and self.rotary.dim > rotated:
            raise ValueError(f"{self.rotary.dim} rotary dimensions do not fit a head of {rotated}")

    @property
    def value_dim(self) -> int:
        """The width of a value head."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def softmax_scale(self) -> float:
        """What the scores are multiplied by."""
        return self.scale if self.scale is not None else 1 / math.sqrt(self.head_dim)

    def context(self, sequence_length: int) -> int:
        """Return how many positions a token attends to, as model FLOPs count them."""
        return sequence_length if self.window is None else min(sequence_length, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """A dense feed-forward layer: down(act(gate) · up) if gated, else down(act(up))."""

    hidden: Count
    gated: bool = True
    activation: Activation = Activation.SILU
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """How a token chooses its experts, and with which weights."""

    # softmax: over all, then top-k; sigmoid: each alone; topk_softmax: over the chosen only;
    # near_softmax: one choice after the other, over those of the rest that are near its best
    scores: Literal["softmax", "sigmoid", "topk_softmax", "near_softmax"] = "softmax"
    near: NotNegative = 0.0  # how far a logit may lie below the best, as a part of the larger one
    bias: bool = False
    # a bias that steers the choice but not the weights; not trained by gradients. transformers
    # holds it as a buffer (DeepSeek) or as a frozen parameter (Ernie), which counts
    correction: Literal["none", "buffer", "parameter"] = "none"
    groups: Count = 1  # only the best `top_groups` groups of experts are eligible
    top_groups: Count = 1
    group_score: Literal["max", "top2"] = "max"
    normalize: bool = False  # the chosen weights sum to one
    normalize_min: NotNegative = 0.0  # the sum is taken to be at least this
    scale: Positive = 1.0  # of the chosen weights
    jitter: Probability = 0.0
    balance_loss: NotNegative = 0.0  # its published coefficient
    balance_loss_on: bool = False  # whether it is added to the loss (output_router_logits)
    # how much of the coefficient a layer gets; transformers takes one mean over all layers, and
    # does not divide by the choices of a token
    balance_share: Positive = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A layer of experts, some of which each token uses, beside shared ones that all use."""

    experts: Count
    experts_per_token: Count
    hidden: Count  # of one expert
    gated: bool = True
    activation: Activation = Activation.SILU
    activation_alpha: Positive = 1.702  # of CLAMPED_SWIGLU
    activation_limit: Positive = 7.0
    bias: bool = False
    router: RouterSpec = RouterSpec()
    shared_hidden: Natural = 0  # of all shared experts together; 0: none
    shared_gate: bool = False  # a sigmoid gate on the shared output (Qwen 2 MoE)
    shared_bias: bool = False

    def __post_init__(self) -> None:
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"a token cannot use {self.experts_per_token} of {self.experts} experts"
            )
        router = self.router
        if self.experts % router.groups:
            raise ValueError(f"{self.experts} experts do not split into {router.groups} groups")
        if router.top_groups > router.groups:
            raise ValueError(f"cannot choose {router.top_groups} of {router.groups} expert groups")
        if self.experts_per_token > self.experts // router.groups * router.top_groups:
            raise ValueError(
                f"{router.top_groups} groups of {self.experts // router.groups} experts do not "
                f"hold the {self.experts_per_token} that a token uses"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """One transformer block: attention and either a dense or an expert feed-forward layer."""

    attention: AttentionSpec
    norm: NormSpec
    mlp: MlpSpec | None = None
    moe: MoeSpec | None = None
    placement: Placement = Placement.PRE
    residual: Residual = Residual.SEQUENTIAL
    residual_multiplier: Positive = 1.0

    def __post_init__(self) -> None:
        if (self.mlp is None) == (self.moe is None):
            raise ValueError("a block has either 'mlp' or 'moe'")
        if self.residual is not Residual.SEQUENTIAL and self.placement is not Placement.PRE:
            raise ValueError("a parallel residual needs norm placement 'pre'")

    def with_balance(self, *, on: bool, share: float | None = None) -> BlockSpec:
        """Return the block with its router's balancing loss added to the loss, or not."""
        if self.moe is None:
            return self
        router = self.moe.router
        share = router.balance_share if share is None else share
        router = replace(router, balance_loss_on=on, balance_share=share)
        return replace(self, moe=replace(self.moe, router=router))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSpec:
    """Unit 0: token embedding, learned positions, projection, norm, scale."""

    dim: Count  # another width than the model's is projected (OPT-350M)
    positions: Natural = 0  # rows of learned positions
    position_offset: Natural = 0  # row of position 0 (OPT: 2)
    norm: NormSpec | None = None
    scale: Positive = 1.0
    padding: Natural | None = None  # a token whose row gets no gradient where it is looked up


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """Unit L+1: final norm, projection to the embedding's width, logits.

    A reward model's head has one score of a whole text in their place.
    """

    norm: NormSpec | None
    tied: bool = False  # to the token embedding
    bias: bool = False
    logit_divisor: Positive = 1.0
    soft_cap: Positive | None = None
    scores: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutSpec:
    """Dropout in training, by place."""

    attention: Probability = 0.0
    residual: Probability = 0.0
    embedding: Probability = 0.0
