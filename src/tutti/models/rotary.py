"""Rotary positions as config.json files say them, in the old and the new form.

transformers 4 wrote `rope_theta` and `rope_scaling`, transformers 5 writes `rope_parameters`; the
rules by which one fills the gaps of the other are those of transformers' modeling_rope_utils.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tutti.document import shown
from tutti.errors import hint
from tutti.models.config import Config
from tutti.models.parts import RotaryScaling, RotarySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryForm:
    """How a family uses rotary positions."""

    interleaved: bool = False
    partial: bool = False  # understands partial_rotary_factor
    theta_key: str = "rope_theta"
    partial_key: str = "partial_rotary_factor"
    # kinds of scaling that mean another one here (Phi-3's old files)
    renamed: tuple[tuple[str, str], ...] = ()
    alpha: bool = False  # "dynamic" with an alpha is a static stretch of theta (Hunyuan)

    def read(self, config: Config, width: int, section: Config | None = None) -> RotarySpec:
        """Return the rotary positions of heads `width` wide."""
        section = rope_section(config) if section is None else section
        theta = (section if "rope_theta" in section.values else config).number(
            "rope_theta" if "rope_theta" in section.values else self.theta_key
        )
        kind = self._kind(section)
        return RotarySpec(
            theta=theta,
            dim=self._dim(config, section, width),
            interleaved=self.interleaved,
            scaling=None if kind == "default" else _SCALINGS[kind](config, section),
        )

    def _kind(self, section: Config) -> str:
        key = "rope_type" if "rope_type" in section.values else "type"
        kind = section.with_defaults({"type": "default"}).text(key)
        kind = dict(self.renamed).get(kind, kind)
        if kind == "dynamic" and self.alpha and section.values.get("alpha"):
            kind = "ntk_alpha"
        if kind != "default" and kind not in _SCALINGS:
            known = ["default", *_SCALINGS]
            raise section.place.key(key).value_error(f"is {shown(kind)}; {hint(kind, known)}")
        return kind

    def _dim(self, config: Config, section: Config, width: int) -> int:
        inner = "partial_rotary_factor" in section.values
        reader, key = (section, "partial_rotary_factor") if inner else (config, self.partial_key)
        factor = reader.maybe_number(key) if inner or key in config.defaults else None
        factor = 1.0 if factor is None else factor
        if not self.partial:
            reader.refuse_unless(key, 1, 1.0, None, why="this model type rotates whole heads")
        dim = int(width * factor)
        if not 2 <= dim <= width or dim % 2:
            raise reader.wrong(key, factor, f"an even part of the head's {width} dimensions")
        return dim


def rope_section(config: Config) -> Config:
    """Return the mapping with the rotary settings, whatever it is called; empty if none."""
    return (
        config.section("rope_scaling")
        or config.section("rope_parameters")
        or Config(values={}, place=config.place)
    )


def score_multiplier(config: Config) -> float:
    """Return what YaRN's `mscale_all_dim` multiplies latent attention's score scale by."""
    section = rope_section(config).with_defaults({"mscale_all_dim": None, "factor": 1.0})
    if section.values.get("rope_type", section.values.get("type", "default")) == "default":
        return 1.0
    mscale = section.maybe_number("mscale_all_dim", zero=True)
    factor = section.maybe_number("factor") or 1.0
    return _mscale(factor, mscale) ** 2 if mscale else 1.0


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _original_length(config: Config, section: Config) -> int:
    for reader in (config, section):
        if reader.values.get("original_max_position_embeddings") is not None:
            return reader.integer("original_max_position_embeddings")
    if config.defaults.get("original_max_position_embeddings") is not None:
        return config.integer("original_max_position_embeddings")
    return config.max_length


def _linear(config: Config, section: Config) -> RotaryScaling:
    del config
    return RotaryScaling(kind="linear", factor=section.number("factor"))


def _dynamic(config: Config, section: Config) -> RotaryScaling:
    return RotaryScaling(
        kind="dynamic", factor=section.number("factor"), original_length=config.max_length
    )


def _ntk_alpha(config: Config, section: Config) -> RotaryScaling:
    del config
    return RotaryScaling(kind="ntk_alpha", alpha=section.number("alpha"))


def _llama3(config: Config, section: Config) -> RotaryScaling:
    return RotaryScaling(
        kind="llama3",
        factor=section.number("factor"),
        original_length=_original_length(config, section),
        low_frequency_factor=section.number("low_freq_factor"),
        high_frequency_factor=section.number("high_freq_factor"),
    )


_OPTIONAL = {
    "factor": None,
    "attention_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
    "beta_fast": None,
    "beta_slow": None,
    "truncate": True,
}


def _yarn(config: Config, section: Config) -> RotaryScaling:
    section = section.with_defaults(_OPTIONAL)
    original = _original_length(config, section)
    factor = section.maybe_number("factor") or config.max_length / original
    attention = section.maybe_number("attention_factor")
    if attention is None:
        mscale = section.maybe_number("mscale", zero=True)
        all_dim = section.maybe_number("mscale_all_dim", zero=True)
        both = mscale and all_dim
        attention = (
            _mscale(factor, mscale or 1.0) / _mscale(factor, all_dim or 1.0)
            if both
            else (_mscale(factor))
        )
    return RotaryScaling(
        kind="yarn",
        factor=factor,
        original_length=original,
        attention_factor=attention,
        beta_fast=section.maybe_number("beta_fast", zero=True) or 32.0,
        beta_slow=section.maybe_number("beta_slow", zero=True) or 1.0,
        truncate=section.flag("truncate"),
    )


def _longrope(config: Config, section: Config) -> RotaryScaling:
    section = section.with_defaults(_OPTIONAL)
    original = _original_length(config, section)
    factor = section.maybe_number("factor") or config.max_length / original
    attention = section.maybe_number("attention_factor")
    if attention is None:
        long = factor > 1 and original > 1
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if long else 1.0
    return RotaryScaling(
        kind="longrope",
        factor=factor,
        original_length=original,
        attention_factor=attention,
        short_factors=section.numbers("short_factor"),
        long_factors=section.numbers("long_factor"),
    )


_SCALINGS: dict[str, Callable[[Config, Config], RotaryScaling]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "ntk_alpha": _ntk_alpha,
}
