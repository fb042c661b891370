"""Reads values out of a Hugging Face config.json, strictly.

Keys that nobody asks for are ignored: such files are full of them. A key that is asked for must
hold what it should; an absent one takes transformers' default for the type, if it has one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tutti.document import Place, shown
from tutti.errors import InputError, hint

T = TypeVar("T")

MOST_LAYERS = 10_000
MOST = 2**28  # of anything else that is counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A config.json with transformers' defaults for its type."""

    values: Mapping[str, object]
    place: Place
    defaults: Mapping[str, object] = field(default_factory=dict)

    def with_defaults(self, defaults: Mapping[str, object]) -> Config:
        """Return the same values over other defaults."""
        return Config(values=self.values, place=self.place, defaults=defaults)

    def raw(self, *keys: str) -> object:
        """Return the first of several names of a value that is present, else its default."""
        for key in keys:
            if key in self.values:
                return self.values[key]
        for key in keys:
            if key in self.defaults:
                return self.defaults[key]
        called = " or ".join(f"'{key}'" for key in keys)
        raise self.place.error(f"{called} is missing; a config.json of this model type has it")

    def wrong(self, key: str, value: object, expected: str) -> InputError:
        """Return the error of a value that is not what it should be."""
        return self.place.key(key).value_error(f"is {shown(value)}; expected {expected}")

    def maybe_integer(self, *keys: str, minimum: int = 1, maximum: int = MOST) -> int | None:
        """Return a whole number or null."""
        value = self.raw(*keys)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(keys[0], value, "a whole number")
        if not minimum <= value <= maximum:
            raise self.wrong(keys[0], value, f"a whole number from {minimum} to {maximum}")
        return value

    def integer(self, *keys: str, minimum: int = 1, maximum: int = MOST) -> int:
        """Return a whole number."""
        value = self.maybe_integer(*keys, minimum=minimum, maximum=maximum)
        if value is None:
            raise self.wrong(keys[0], None, "a whole number")
        return value

    def maybe_number(self, *keys: str, zero: bool = False) -> float | None:
        """Return a finite number above zero (or, if `zero`, at least zero), or null."""
        value = self.raw(*keys)
        if value is None:
            return None
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.wrong(keys[0], value, "a number")
        if not 1e-30 < value < 1e30 and not (zero and value == 0):  # false for NaN
            raise self.wrong(keys[0], value, "a number " + ("≥ 0" if zero else "above 0"))
        return float(value)

    def number(self, *keys: str, zero: bool = False) -> float:
        """Return a finite number above zero (or, if `zero`, at least zero)."""
        value = self.maybe_number(*keys, zero=zero)
        if value is None:
            raise self.wrong(keys[0], None, "a number")
        return value

    def probability(self, *keys: str) -> float:
        """Return a number from 0 to 1; null is 0."""
        value = self.maybe_number(*keys, zero=True) or 0.0
        if value > 1:
            raise self.wrong(keys[0], value, "a number from 0 to 1")
        return value

    def flag(self, *keys: str) -> bool:
        """Return true or false; null is false."""
        value = self.raw(*keys)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.wrong(keys[0], value, "true or false")
        return value

    def text(self, *keys: str) -> str:
        """Return a text."""
        value = self.raw(*keys)
        if not isinstance(value, str):
            raise self.wrong(keys[0], value, "text")
        return value

    def choice(self, key: str, choices: Mapping[str, T]) -> T:
        """Return what a text stands for."""
        value = self.text(key)
        if value not in choices:
            raise self.place.key(key).value_error(f"is '{value}'; {hint(value, choices)}")
        return choices[value]

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers above zero."""
        value = self.raw(key)
        good = isinstance(value, list) and all(
            isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < math.inf
            for x in value
        )
        if not good:
            raise self.wrong(key, value, "a list of numbers above 0")
        assert isinstance(value, list)
        return tuple(float(x) for x in value)

    def section(self, key: str) -> Config | None:
        """Return a nested mapping; None if it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, value, "a mapping")
        return Config(values=value, place=self.place.key(key))

    def refuse_unless(self, key: str, *allowed: object, why: str) -> None:
        """Refuse a value that would change the computation in a way tutti does not model."""
        if key in self.values:
            value = self.values[key]
            if not any(value == good and type(value) is type(good) for good in allowed):
                raise self.place.key(key).value_error(f"is {shown(value)}; {why}")

    # --- sizes that nearly all types call the same -------------------------------------------

    @property
    def num_layers(self) -> int:
        """The number of blocks."""
        return self.integer("num_hidden_layers", "n_layer", maximum=MOST_LAYERS)

    @property
    def hidden(self) -> int:
        """The width of the residual stream."""
        return self.integer("hidden_size", "n_embd", "n_embed")

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.integer("num_attention_heads", "n_head")

    @property
    def max_length(self) -> int:
        """The longest sequence."""
        return self.integer("max_position_embeddings", "n_positions")

    @property
    def even_head_dim(self) -> int:
        """The width of a head where the heads share the hidden size."""
        hidden, heads = self.hidden, self.heads
        if hidden % heads:
            raise self.place.error(
                f"'hidden_size' is {hidden}, which the {heads} attention heads do not divide"
            )
        return hidden // heads

    def layer_numbers(self, key: str) -> frozenset[int]:
        """Return a list of layer numbers; null is none."""
        value = self.raw(key)
        good = value is None or (
            isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
        )
        if not good:
            raise self.wrong(key, value, "a list of layer numbers")
        return frozenset(value) if isinstance(value, list) else frozenset()
