"""The weight maps of all model types, registered by `model_type`."""

from tutti.huggingface.maps import experts, gpt_like, latent, llama_like
from tutti.huggingface.maps.registry import key_table, mapped_types, register

__all__ = [
    "experts",
    "gpt_like",
    "key_table",
    "latent",
    "llama_like",
    "mapped_types",
    "register",
]
