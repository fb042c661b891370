"""One small adapter per family of Hugging Face model types, registered by `model_type`."""

from tutti.models.families import experts, gemma, gpt_like, latent, llama_like
from tutti.models.families.registry import Family, model_types, read_config, register

__all__ = [
    "Family",
    "experts",
    "gemma",
    "gpt_like",
    "latent",
    "llama_like",
    "model_types",
    "read_config",
    "register",
]
