"""One small adapter per family of Hugging Face model types, registered by `model_type`."""

from tutti.models.families import (
    alternating,
    experts,
    gemma,
    gpt_like,
    latent,
    llama_like,
    open_experts,
)
from tutti.models.families.registry import Family, model_types, read_config, register

__all__ = [
    "Family",
    "alternating",
    "experts",
    "gemma",
    "gpt_like",
    "latent",
    "llama_like",
    "model_types",
    "open_experts",
    "read_config",
    "register",
]
