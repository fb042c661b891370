"""GPT-2, GPT-NeoX, OPT, Bloom and Falcon: names of their own, fused queries, keys and values."""

from __future__ import annotations

from tutti.huggingface.maps.llama_like import LLAMA
from tutti.huggingface.maps.registry import register
from tutti.huggingface.weight_map import Heads, Rows, Transposed, WeightMap
from tutti.models import ModelSpec, Residual

_PARTS = ("attention.query", "attention.key", "attention.value")
_C_ATTN = Rows("attn.c_attn", of=_PARTS, transposed=True)
_CAUSAL_MASKS = (r".*\.(attn|attention|self_attention)\.(bias|masked_bias)",)

GPT2 = WeightMap(
    base="transformer.",
    layers="transformer.h.{layer}.",
    embedding={"token": "transformer.wte", "position": "transformer.wpe"},
    block={
        "attention_norm": "ln_1",
        "mlp_norm": "ln_2",
        **dict.fromkeys(_PARTS, _C_ATTN),
        "attention.output": Transposed("attn.c_proj"),
        "mlp.up": Transposed("mlp.c_fc"),
        "mlp.down": Transposed("mlp.c_proj"),
    },
    head={"norm": "transformer.ln_f", "logits": "lm_head"},
    carried=_CAUSAL_MASKS,
)

GPT_NEOX = WeightMap(
    base="gpt_neox.",
    layers="gpt_neox.layers.{layer}.",
    embedding={"token": "gpt_neox.embed_in"},
    block={
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        **dict.fromkeys(_PARTS, Heads("attention.query_key_value")),
        "attention.output": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    head={"norm": "gpt_neox.final_layer_norm", "logits": "embed_out"},
    carried=(*LLAMA.carried, *_CAUSAL_MASKS),
)

BLOOM = WeightMap(
    base="transformer.",
    layers="transformer.h.{layer}.",
    embedding={
        "token": "transformer.word_embeddings",
        "norm": "transformer.word_embeddings_layernorm",
    },
    block={
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        **dict.fromkeys(_PARTS, Heads("self_attention.query_key_value")),
        "attention.output": "self_attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    head={"norm": "transformer.ln_f", "logits": "lm_head"},
    carried=(*LLAMA.carried, *_CAUSAL_MASKS),
)

OPT = WeightMap(
    layers="model.decoder.layers.{layer}.",
    embedding={
        "token": "model.decoder.embed_tokens",
        "position": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in",
    },
    block={
        "attention_norm": "self_attn_layer_norm",
        "attention_post_norm": "self_attn_layer_norm",
        "mlp_norm": "final_layer_norm",
        "mlp_post_norm": "final_layer_norm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.out_proj",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
    },
    head={
        "norm": "model.decoder.final_layer_norm",
        "project_out": "model.decoder.project_out",
        "logits": "lm_head",
    },
    carried=(),
)


def _falcon(spec: ModelSpec) -> WeightMap:
    """Return Bloom's names, with two norms of their own where they stand side by side."""
    if spec.blocks[0].residual is Residual.PARALLEL_TWO_NORMS:
        return BLOOM.but(block={"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"})
    return BLOOM


register(GPT2, "gpt2")
register(GPT_NEOX, "gpt_neox")
register(BLOOM, "bloom")
register(OPT, "opt")
register(_falcon, "falcon")
