"""A family as a declaration: Llama, and what a type does differently.

Every field of `Decoder`, `Attention` and `Mlp` has Llama's behaviour as its default, so that a new
Llama-like type is a few lines. A `Setting` is a fixed value or the name of the config key that
holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tutti.models.config import Config
from tutti.models.parts import (
    Activation,
    AttentionSpec,
    BlockSpec,
    DropoutSpec,
    EmbeddingSpec,
    HeadSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    Placement,
    QkNormSpec,
    Residual,
    RotarySpec,
)
from tutti.models.rotary import RotaryForm, rope_section
from tutti.models.spec import ModelSpec, cycle_of

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_accurate": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_python_tanh": Activation.GELU_TANH,
    "quick_gelu": Activation.QUICK_GELU,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
}

# transformers' defaults that most types share; each type lists only what it has otherwise.
LLAMA_DEFAULTS: Mapping[str, object] = {
    "max_position_embeddings": 2048,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}

Setting = bool | str
WHOLE_HEADS = RotaryForm()


def setting(config: Config, value: Setting) -> bool:
    """Return a fixed setting, or the flag it names."""
    return config.flag(value) if isinstance(value, str) else value


def padding_row(config: Config) -> int | None:
    """Return the row of the padding token, whose look-ups transformers gives no gradient."""
    vocab = config.integer("vocab_size")
    row = config.maybe_integer("pad_token_id", minimum=-vocab)
    if row is None or row >= vocab:
        return None
    return row % vocab  # torch counts negative ones from the end


def rms_norm(config: Config) -> NormSpec:
    """RMSNorm, as Llama has it."""
    return NormSpec(kind="rms", eps=config.number("rms_norm_eps"))


def gemma_norm(config: Config) -> NormSpec:
    """RMSNorm that multiplies by one plus its weight."""
    return NormSpec(kind="rms", eps=config.number("rms_norm_eps"), unit_offset=True)


def layer_norm(
    key: str, *, bias: bool = True, unit_offset: bool = False
) -> Callable[[Config], NormSpec]:
    """LayerNorm with its epsilon under `key`, and with a bias unless told otherwise."""

    def read(config: Config) -> NormSpec:
        eps = config.number(key)
        return NormSpec(kind="layer", eps=eps, bias=bias, unit_offset=unit_offset)

    return read


# --- attention windows -----------------------------------------------------------------------


def no_window(config: Config, layer: int) -> int | None:
    """Return none: every token sees all before it."""
    del config, layer
    return None


def same_window(config: Config, layer: int) -> int | None:
    """All layers have the window of `sliding_window`, if it is not null."""
    del layer
    return config.maybe_integer("sliding_window")


def typed_window(
    sliding: Callable[[Config, int], bool],
) -> Callable[[Config, int], int | None]:
    """Layers of `layer_types`, or those that `sliding` picks, have the window."""

    def read(config: Config, layer: int) -> int | None:
        if not is_sliding(config, layer, sliding):
            return None
        return config.maybe_integer("sliding_window")

    return read


def is_sliding(config: Config, layer: int, otherwise: Callable[[Config, int], bool]) -> bool:
    """Tell whether a layer slides, by `layer_types` where it is given."""
    kinds = config.values.get("layer_types")
    if kinds is None:
        return otherwise(config, layer)
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != config.num_layers:
        raise config.wrong("layer_types", kinds, f"a list of {config.num_layers} layer types")
    if kinds[layer] not in known:
        raise config.wrong("layer_types", kinds[layer], " or ".join(known))
    return bool(kinds[layer] == "sliding_attention")


# --- the parts -------------------------------------------------------------------------------


class AttentionForm(Protocol):
    """Reads the attention of one layer."""

    def read(self, config: Config, layer: int) -> AttentionSpec:
        """Return it."""


class FeedForwardForm(Protocol):
    """Reads the feed-forward layer of one layer."""

    def read(self, config: Config, layer: int) -> MlpSpec | MoeSpec:
        """Return it."""


def _whole_section(config: Config, layer: int) -> Config:
    del layer
    return rope_section(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Multi-head or grouped-query attention with rotary positions."""

    qkv_bias: Setting = "attention_bias"
    output_bias: Setting = "attention_bias"
    qk_norm: Callable[[Config], QkNormSpec | None] = lambda _: None
    rotary: RotaryForm = WHOLE_HEADS
    rotary_section: Callable[[Config, int], Config] = _whole_section
    rotates: Callable[[Config, int], bool] = lambda _config, _layer: True  # has positions at all
    window: Callable[[Config, int], int | None] = no_window
    scale: Callable[[Config], float | None] = lambda _: None
    soft_cap: str | None = None
    sinks: bool = False
    own_head_dim: bool = True  # understands 'head_dim'

    def read(self, config: Config, layer: int) -> AttentionSpec:
        """Return the attention of one layer."""
        head_dim = config.maybe_integer("head_dim") if self.own_head_dim else None
        head_dim = config.even_head_dim if head_dim is None else head_dim
        return AttentionSpec(
            heads=config.heads,
            kv_heads=config.maybe_integer("num_key_value_heads") or config.heads,
            head_dim=head_dim,
            qkv_bias=setting(config, self.qkv_bias),
            output_bias=setting(config, self.output_bias),
            qk_norm=self.qk_norm(config),
            rotary=self._rotary(config, layer, head_dim),
            window=self.window(config, layer),
            soft_cap=config.maybe_number(self.soft_cap) if self.soft_cap else None,
            sinks=self.sinks,
            scale=self.scale(config),
        )

    def _rotary(self, config: Config, layer: int, head_dim: int) -> RotarySpec | None:
        if not self.rotates(config, layer):
            return None
        return self.rotary.read(config, head_dim, self.rotary_section(config, layer))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """A dense feed-forward layer."""

    width: str = "intermediate_size"
    gated: bool = True
    activation: str = "hidden_act"
    bias: Setting = "mlp_bias"

    def read(self, config: Config, layer: int) -> MlpSpec:
        """Return the feed-forward layer."""
        del layer
        return MlpSpec(
            hidden=config.integer(self.width),
            gated=self.gated,
            activation=config.choice(self.activation, ACTIVATIONS),
            bias=setting(config, self.bias),
        )


def _attention_dropout(config: Config) -> DropoutSpec:
    return DropoutSpec(attention=config.probability("attention_dropout"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A model type in terms of its differences from Llama."""

    model_type: str
    differs: Mapping[str, object] = field(default_factory=dict)  # from LLAMA_DEFAULTS
    norm: Callable[[Config], NormSpec] = rms_norm
    attention: AttentionForm = Attention()
    feed_forward: FeedForwardForm = Mlp()
    placement: Placement = Placement.PRE
    residual: Callable[[Config], Residual] = lambda _: Residual.SEQUENTIAL
    residual_multiplier: Callable[[Config], float] = lambda _: 1.0
    embedding_scale: Callable[[Config], float] = lambda _: 1.0
    logit_divisor: Callable[[Config], float] = lambda _: 1.0
    logit_soft_cap: str | None = None
    head_bias: Setting = False
    dropout: Callable[[Config], DropoutSpec] = _attention_dropout
    prediction_heads: tuple[str, ...] = ()
    has_padding: bool = True  # transformers gives its embedding a padding row
    refuse: Mapping[str, tuple[object, ...]] = field(default_factory=dict)  # key: what is fine

    @property
    def defaults(self) -> Mapping[str, object]:
        """What transformers assumes where a key is absent."""
        return {**LLAMA_DEFAULTS, **self.differs}

    def read(self, config: Config, name: str) -> ModelSpec:
        """Return the model that a config describes."""
        for key, allowed in self.refuse.items():
            config.refuse_unless(key, *allowed, why=f"{self.model_type} is not modelled with that")
        heads = self.prediction_heads
        return assemble(
            config,
            name,
            self.model_type,
            block=lambda layer: self._block(config, layer),
            embedding=EmbeddingSpec(
                dim=config.hidden,
                scale=self.embedding_scale(config),
                padding=padding_row(config) if self.has_padding else None,
            ),
            head=HeadSpec(
                norm=self.norm(config),
                tied=config.flag("tie_word_embeddings"),
                bias=setting(config, self.head_bias),
                logit_divisor=self.logit_divisor(config),
                soft_cap=config.maybe_number(self.logit_soft_cap) if self.logit_soft_cap else None,
            ),
            dropout=self.dropout(config),
            published_prediction_heads=config.integer(*heads, minimum=0) if heads else 0,
        )

    def _block(self, config: Config, layer: int) -> BlockSpec:
        feed_forward = self.feed_forward.read(config, layer)
        return BlockSpec(
            attention=self.attention.read(config, layer),
            norm=self.norm(config),
            mlp=feed_forward if isinstance(feed_forward, MlpSpec) else None,
            moe=feed_forward if isinstance(feed_forward, MoeSpec) else None,
            placement=self.placement,
            residual=self.residual(config),
            residual_multiplier=self.residual_multiplier(config),
        )


def assemble(
    config: Config,
    name: str,
    model_type: str,
    *,
    block: Callable[[int], BlockSpec],
    embedding: EmbeddingSpec,
    head: HeadSpec,
    dropout: DropoutSpec,
    published_prediction_heads: int = 0,
) -> ModelSpec:
    """Return the model of these parts; equal blocks are kept once."""
    blocks: dict[BlockSpec, int] = {}
    indices = [blocks.setdefault(block(i), len(blocks)) for i in range(config.num_layers)]
    return ModelSpec(
        name=name,
        model_type=model_type,
        num_layers=config.num_layers,
        hidden=config.hidden,
        vocab=config.integer("vocab_size"),
        max_length=config.max_length,
        embedding=embedding,
        blocks=tuple(blocks),
        cycle=cycle_of(indices),
        head=head,
        dropout=dropout,
        published_prediction_heads=published_prediction_heads,
    )
