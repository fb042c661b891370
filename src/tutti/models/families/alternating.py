"""Dense types whose layers take turns: some slide, some have no positions at all."""

from __future__ import annotations

from tutti.models.config import Config
from tutti.models.families.decoder import Attention, Decoder, Mlp, is_sliding, layer_norm
from tutti.models.families.llama_like import INTERLEAVED, olmo_qk_norm, per_head_norm
from tutti.models.families.registry import register
from tutti.models.parts import Placement, Residual
from tutti.models.rotary import rope_section


def _all_but_each(config: Config, layer: int) -> bool:
    """Tell whether a layer slides: all do, but the last of each `sliding_window_pattern`."""
    return (layer + 1) % config.integer("sliding_window_pattern") != 0


# --- SmolLM 3 --------------------------------------------------------------------------------


def _smollm3_rotates(config: Config, layer: int) -> bool:
    """Tell whether a layer has positions: `no_rope_layers` has a 1 where it does."""
    chosen = config.values.get("no_rope_layers")
    if chosen is None:
        return (layer + 1) % config.integer("no_rope_layer_interval") != 0
    good = isinstance(chosen, list) and all(value in (0, 1) for value in chosen)
    if not good or len(chosen) < config.num_layers:  # type: ignore[arg-type]
        expected = f"a list of {config.num_layers} numbers, 1 where a layer has rotary positions"
        raise config.wrong("no_rope_layers", chosen, expected)
    return bool(chosen[layer])  # type: ignore[index]


def _smollm3_window(config: Config, layer: int) -> int | None:
    window = config.maybe_integer("sliding_window")
    if window is None or not config.flag("use_sliding_window"):
        return None
    slides = is_sliding(config, layer, lambda config, layer: not _smollm3_rotates(config, layer))
    return window if slides else None


# --- EXAONE 4 and Command R7B: layers that slide have positions, the others have none ---------


def _slides(config: Config, layer: int) -> bool:
    return config.maybe_integer("sliding_window") is not None and is_sliding(
        config, layer, _all_but_each
    )


def _window(config: Config, layer: int) -> int | None:
    return config.maybe_integer("sliding_window") if _slides(config, layer) else None


def _exaone4_rotates(config: Config, layer: int) -> bool:
    return config.maybe_integer("sliding_window") is None or _slides(config, layer)


def _cohere2_rotates(config: Config, layer: int) -> bool:
    # its layers ask for the window, so without one none has positions
    return _slides(config, layer)


# --- Olmo 3: rotary positions are stretched in the layers that see everything -----------------


def _olmo3_rotary(config: Config, layer: int) -> Config:
    slides = is_sliding(config, layer, _all_but_each)
    kind = "sliding_attention" if slides else "full_attention"
    nested = config.section("rope_parameters")
    section = nested.section(kind) if nested is not None else None
    values = dict(section.values) if section is not None else {}
    if not slides:
        values.update(rope.values if (rope := config.section("rope_scaling")) else {})
    # transformers gives a `rope_theta` of the old form to the full layers alone
    values.setdefault(
        "rope_theta", config.defaults["rope_theta"] if slides else config.number("rope_theta")
    )
    place = section.place if section is not None else rope_section(config).place
    return Config(values=values, place=place)


register(
    Decoder(
        model_type="smollm3",
        differs={
            "pad_token_id": 128004,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layer_interval": 4,
        },
        attention=Attention(window=_smollm3_window, rotates=_smollm3_rotates),
    ),
    Decoder(
        model_type="exaone4",
        differs={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        attention=Attention(
            qkv_bias=False,
            output_bias=False,
            qk_norm=per_head_norm,
            window=_window,
            rotates=_exaone4_rotates,
        ),
        feed_forward=Mlp(bias=False),
        placement=Placement.BRANCH,
    ),
    Decoder(
        model_type="cohere2",
        differs={
            "pad_token_id": 0,
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        norm=layer_norm("layer_norm_eps", bias=False),
        attention=Attention(
            rotary=INTERLEAVED, window=_window, rotates=_cohere2_rotates, own_head_dim=False
        ),
        feed_forward=Mlp(bias=False),
        residual=lambda _: Residual.PARALLEL_ONE_NORM,
        logit_divisor=lambda config: 1 / config.number("logit_scale"),
        refuse={"use_qk_norm": (False, None)},
    ),
    Decoder(
        model_type="olmo3",
        differs={
            "pad_token_id": 1,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        attention=Attention(qk_norm=olmo_qk_norm, window=_window, rotary_section=_olmo3_rotary),
        feed_forward=Mlp(bias=False),
        placement=Placement.BRANCH,
    ),
)
