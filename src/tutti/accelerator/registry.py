"""Implementations of operators: who registered what, for which devices and calls.

Every operator has a reference in plain torch. A chip's package registers more with `register`; each
says which calls it supports, and why not the others. Which one runs is `Operators`' business.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tutti.accelerator.reference import (
    adapted,
    attention,
    experts,
    linear,
    loss,
    narrow,
    narrow_rows,
    norm,
    optimizer,
    paged,
    pointwise,
    quantised,
    quantised_pages,
    sampling,
)
from tutti.errors import InputError, hint

OVERRIDE = "TUTTI_OPERATORS"  # implementations to use, whatever was measured

Supports = Callable[..., str | None]


def any_call(*_args: Any, **_options: Any) -> str | None:
    """Support every call."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One way to run one operator."""

    operator: str
    name: str  # "reference", "sdpa", "triton", …
    function: Callable[..., Any]
    devices: tuple[str, ...] | None = None  # torch device types; None: any
    supports: Supports = any_call  # called like the operator; says in one line why not, or None
    rank: int = 0  # the highest runs where nothing was measured
    exact: bool = True  # differentiable to the reference's tolerance; else for inference only
    needs: str | None = None  # a package that must be importable
    deterministic: bool = True  # the same call gives the same gradients, bit for bit
    invariant: bool = False  # a row's result has the same bits whatever the other rows are
    asks_host: bool = False  # it reads numbers off the device to go on: no graph can hold it
    serves: bool = False  # only operators that were opened for serving have it

    @property
    def infers(self) -> bool:
        """Whether it is for inference alone: no table of training's measurements has it."""
        return not self.exact and self.rank >= 0

    @property
    def present(self) -> bool:
        """Whether the package it needs is installed."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def runs_on(self, device_type: str) -> bool:
        """Tell whether it is for a type of device."""
        return self.devices is None or device_type in self.devices


REFERENCES: dict[str, Callable[..., Any]] = {
    "linear": linear.linear,
    "grouped_linear": linear.grouped_linear,
    "narrow_linear": narrow.narrow_linear,
    "narrow_grouped_linear": narrow.narrow_grouped_linear,
    "adapted_linear": adapted.adapted_linear,
    "quantised_linear": quantised.quantised_linear,
    "quantised_grouped_linear": quantised.quantised_grouped_linear,
    "embedding": linear.embedding,
    "rms_norm": norm.rms_norm,
    "layer_norm": norm.layer_norm,
    "add_rms_norm": norm.add_rms_norm,
    "add_layer_norm": norm.add_layer_norm,
    "rotary": pointwise.rotary,
    "split_rotary": pointwise.split_rotary,
    "activation": pointwise.activation,
    "gated_activation": pointwise.gated_activation,
    "attention": attention.attention,
    "attention_with_lse": attention.attention_with_lse,
    "store_pages": paged.store_pages,
    "store_latents": paged.store_latents,
    "store_heads": paged.store_heads,
    "paged_attention": paged.paged_attention,
    "latent_attention": paged.latent_attention,
    "store_quantised_pages": quantised_pages.store_quantised_pages,
    "quantised_paged_attention": quantised_pages.quantised_paged_attention,
    "sample": sampling.sample,
    "narrow_rms_norm": narrow_rows.narrow_rms_norm,
    "narrow_gated_activation": narrow_rows.narrow_gated_activation,
    "linear_cross_entropy": loss.linear_cross_entropy,
    "route": experts.route,
    "permute": experts.permute,
    "unpermute": experts.unpermute,
    "adamw": optimizer.adamw,
    "squared_norm": optimizer.squared_norm,
}

# references that do: each expert's rows are a product of their own, each sequence's keys too
ASK_HOST = (
    "grouped_linear", "narrow_grouped_linear", "quantised_grouped_linear", "paged_attention",
    "latent_attention", "quantised_paged_attention",
)  # fmt: skip

_registered: dict[str, list[Implementation]] = {
    name: [
        Implementation(
            operator=name, name="reference", function=function, asks_host=name in ASK_HOST
        )
    ]
    for name, function in REFERENCES.items()
}


def operator_names() -> tuple[str, ...]:
    """Return the names of all operators."""
    return tuple(_registered)


def register(*implementations: Implementation) -> None:
    """Add implementations; a name that an operator has already is refused."""
    for new in implementations:
        if new.operator not in _registered:
            raise InputError(
                f"operator '{new.operator}' of implementation '{new.name}': "
                f"{hint(new.operator, _registered)}"
            )
        if any(known.name == new.name for known in _registered[new.operator]):
            raise InputError(
                f"operator '{new.operator}' has an implementation '{new.name}' already; "
                "choose another name"
            )
        _registered[new.operator].append(new)


def unregister(operator: str, name: str) -> None:
    """Take an implementation back; the reference stays."""
    if name == "reference":
        raise InputError(f"operator '{operator}': the reference cannot be taken away")
    known = _registered[operator]
    if not any(implementation.name == name for implementation in known):
        raise InputError(
            f"operator '{operator}' has no implementation '{name}'; "
            f"{hint(name, (i.name for i in known))}"
        )
    known[:] = [implementation for implementation in known if implementation.name != name]


def registered(operator: str, device_type: str) -> Sequence[Implementation]:
    """Return everything for an operator on a type of device, the preferred first."""
    if operator not in _registered:
        raise InputError(f"no operator '{operator}'; {hint(operator, _registered)}")
    running = [i for i in _registered[operator] if i.runs_on(device_type)]
    return sorted(running, key=lambda i: -i.rank)


def usual(operator: str, device_type: str) -> list[Implementation]:
    """Return the implementations for a type of device, without those for servers alone."""
    return [each for each in implementations(operator, device_type) if not each.serves]


def implementations(operator: str, device_type: str) -> Sequence[Implementation]:
    """Return what can run an operator on a type of device here, the preferred first."""
    return [i for i in registered(operator, device_type) if i.present]


def overrides(text: str) -> dict[str, str]:
    """Read 'rms_norm=reference,attention=sdpa'."""
    chosen: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        operator, _, name = item.partition("=")
        if operator not in operator_names():
            raise InputError(f"{OVERRIDE}: '{operator}'; {hint(operator, operator_names())}")
        if not name:
            raise InputError(f"{OVERRIDE}: '{item}'; write operator=implementation")
        chosen[operator] = name
    return chosen
