"""A model's shape and numbers as Megatron-LM spells them; FlagScale uses the same names.

Flags are those of Megatron-LM's `megatron/training/arguments.py` (late 2025). A model that these
flags cannot say is refused with the reason: a run that trains another model would be worse.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from tutti.errors import InputError
from tutti.export.megatron_limits import (
    is_normalised,
    linear_biases,
    model_problems,
    only_qkv_bias,
)
from tutti.hardware.chip import Dtype
from tutti.models.parts import (
    Activation,
    AttentionSpec,
    BlockSpec,
    MoeSpec,
    NormSpec,
    RotaryScaling,
    RotarySpec,
)
from tutti.models.spec import ModelSpec
from tutti.plan.job import Job

Value = bool | int | float | str | list[str]
Flags = dict[str, Value]


def refusal(target: str, where: str, why: str) -> InputError:
    """Return the error of a plan that another framework cannot express."""
    return InputError(f"{target}: {where}: {why}")


def to_arguments(flags: Mapping[str, Value]) -> list[str]:
    """Write flags as a command line takes them; False is left out."""
    words: list[str] = []
    for name, value in flags.items():
        if value is False:
            continue
        words.append(f"--{name}")
        if isinstance(value, list):
            words += value
        elif value is not True:
            words.append(str(value))
    return words


def model_flags(model: ModelSpec, job: Job, target: str) -> Flags:
    """Return the flags that describe a model and the sequences it is trained on."""
    blocks = [model.blocks[index] for index in model.layer_blocks]
    for problem in model_problems(model, blocks, job):
        raise refusal(target, f"model '{model.name}'", f"{problem}, which Megatron-LM cannot say")
    attention = blocks[0].attention
    flags: Flags = {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": _ffn_width(blocks),
        "num-attention-heads": attention.heads,
    }
    if attention.latent is None:
        if attention.kv_heads != attention.heads:
            flags |= {"group-query-attention": True, "num-query-groups": attention.kv_heads}
        if attention.head_dim * attention.heads != model.hidden:
            flags["kv-channels"] = attention.head_dim
    flags |= {
        "seq-length": job.sequence_length,
        "max-position-embeddings": _positions(model, job),
        "vocab-size": model.vocab,
        "untie-embeddings-and-output-weights": not model.head.tied,
        **_norm_flags(blocks[0].norm),
        **_activation_flags(blocks),
        **_bias_flags(blocks),
        **_position_flags(model, attention.rotary),
        **_attention_flags(blocks),
        "attention-dropout": float(model.dropout.attention),
        "hidden-dropout": float(model.dropout.residual),
        **_expert_flags(blocks, job),
    }
    if model.prediction_heads:
        flags["mtp-num-layers"] = model.prediction_heads
    return {name: value for name, value in flags.items() if value is not False}


def precision_flags(job: Job, target: str) -> Flags:
    """Return the flags of a job's number formats and optimizer."""
    precision = job.precision
    names = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}
    if job.optimizer not in names:
        raise refusal(target, f"job, optimizer {job.optimizer}", "it has none of this name")
    flags: Flags = {"optimizer": names[job.optimizer]}
    if job.optimizer == "sgd":
        flags["sgd-momentum"] = 0.0
    where = f"job, precision {precision.label}"
    if job.wide_units:
        why = "single blocks in 16 bits; only the first and last ones can be so there"
        raise refusal(target, "job, wide_units", why)
    if precision.compute is Dtype.FP8:
        flags["fp8-format"] = "hybrid"
    elif precision.compute is not precision.parameters:
        why = f"computes in {precision.compute}, holds {precision.parameters}; they must be one"
        raise refusal(target, where, why)
    if precision.parameters is Dtype.FP32:
        if precision.gradients is not Dtype.FP32 or precision.moments is not Dtype.FP32:
            raise refusal(target, where, "fp32 parameters need fp32 gradients and moments")
        return flags
    if precision.parameters not in (Dtype.BF16, Dtype.FP16):
        raise refusal(target, where, f"parameters in {precision.parameters}; use bf16 or fp16")
    if precision.master is not Dtype.FP32:
        has = precision.master or "none"
        raise refusal(target, where, f"master copy {has}; Megatron-LM keeps an fp32 one")
    flags[precision.parameters.value] = True
    if precision.gradients is Dtype.FP32:
        flags["accumulate-allreduce-grads-in-fp32"] = True
    elif precision.gradients is Dtype.BF16 and precision.parameters is Dtype.BF16:
        flags["grad-reduce-in-bf16"] = True
    elif precision.gradients is not precision.parameters:
        raise refusal(target, where, f"gradients in {precision.gradients}; use fp32")
    if precision.moments is not Dtype.FP32:
        kind = precision.moments.value
        flags |= {"use-precision-aware-optimizer": True, "exp-avg-dtype": kind}
        flags["exp-avg-sq-dtype"] = kind
    return flags


# --- the flags -------------------------------------------------------------------------------


def _ffn_width(blocks: Sequence[BlockSpec]) -> int:
    for block in blocks:
        if block.mlp is not None:
            return block.mlp.hidden
    return next(block.moe.hidden for block in blocks if block.moe is not None)


def _positions(model: ModelSpec, job: Job) -> int:
    return model.embedding.positions or max(model.max_length, job.sequence_length)


def _norm_flags(norm: NormSpec) -> Flags:
    return {
        "normalization": "RMSNorm" if norm.kind == "rms" else "LayerNorm",
        "norm-epsilon": float(norm.eps),
        "apply-layernorm-1p": norm.unit_offset,
    }


_ACTIVATIONS: dict[tuple[Activation, bool], Flags] = {
    (Activation.SILU, True): {"swiglu": True},
    (Activation.GELU_TANH, False): {},  # the default, fused with the bias
    (Activation.GELU, False): {"no-bias-gelu-fusion": True},
    (Activation.RELU2, False): {"squared-relu": True},
    (Activation.QUICK_GELU, True): {"quick-geglu": True},
    (Activation.CLAMPED_SWIGLU, True): {"quick-geglu": True, "glu-linear-offset": 1.0},
}


def _activation_flags(blocks: Sequence[BlockSpec]) -> Flags:
    layer = blocks[0].mlp or blocks[0].moe
    if layer is None:  # a block has one or the other
        return {}
    flags = dict(_ACTIVATIONS[layer.activation, layer.gated])
    if layer.activation is Activation.CLAMPED_SWIGLU and isinstance(layer, MoeSpec):
        flags["activation-func-clamp-value"] = float(layer.activation_limit)
    return flags


def _bias_flags(blocks: Sequence[BlockSpec]) -> Flags:
    if only_qkv_bias(blocks):
        return {"disable-bias-linear": True, "add-qkv-bias": True}
    return {"disable-bias-linear": not any(linear_biases(blocks))}


def _position_flags(model: ModelSpec, rotary: RotarySpec | None) -> Flags:
    if rotary is None:
        learned = "learned_absolute" if model.embedding.positions else "none"
        return {"position-embedding-type": learned}
    attention = model.blocks[model.layer_blocks[0]].attention
    width = attention.latent.rope_dim if attention.latent else attention.head_dim
    flags: Flags = {"position-embedding-type": "rope", "rotary-base": int(rotary.theta)}
    if rotary.dim != width:
        flags["rotary-percent"] = rotary.dim / width
    if rotary.interleaved and attention.latent is None:  # latent attention always interleaves
        flags["rotary-interleaved"] = True
    scaling = rotary.scaling
    if attention.latent is not None:
        return flags | _latent_rope(attention, scaling)
    if scaling is not None and scaling.kind == "llama3":
        flags |= {"use-rope-scaling": True, "rope-scaling-factor": float(scaling.factor)}
    elif scaling is not None:
        flags["rotary-seq-len-interpolation-factor"] = int(scaling.factor)
    return flags


def _latent_rope(attention: AttentionSpec, scaling: RotaryScaling | None) -> Flags:
    """Say YaRN by the two constants from which attention factor and softmax scale came."""
    if scaling is None or scaling.kind != "yarn":
        return {"rope-type": "rope"}
    step = 0.1 * math.log(scaling.factor) if scaling.factor > 1 else 1.0
    grown = math.sqrt(attention.softmax_scale * math.sqrt(attention.head_dim))
    return {
        "rope-type": "yarn",
        "rotary-scaling-factor": float(scaling.factor),
        "mscale": round((scaling.attention_factor * grown - 1) / step, 6),
        "mscale-all-dim": round((grown - 1) / step, 6),
    }


def _attention_flags(blocks: Sequence[BlockSpec]) -> Flags:
    attention, flags = blocks[0].attention, Flags()
    latent = attention.latent
    if latent is not None:
        flags |= {"multi-latent-attention": True, "kv-lora-rank": latent.kv_rank}
        if latent.query_rank is not None:
            flags["q-lora-rank"] = latent.query_rank
        flags |= {
            "qk-head-dim": latent.nope_dim,
            "qk-pos-emb-head-dim": latent.rope_dim,
            "v-head-dim": latent.value_dim,
            "qk-layernorm": True,  # the norms of the latents
        }
    elif attention.qk_norm is not None:
        flags["qk-layernorm"] = True
    if attention.sinks:
        flags["softmax-type"] = "learnable"
    windows = [block.attention.window for block in blocks]
    if any(windows):
        # A window of w positions is the token itself and w - 1 before it.
        flags["window-size"] = f"{max(filter(None, windows)) - 1},0"
        if not all(windows):
            flags["window-attn-skip-freq"] = _pattern([int(w is not None) for w in windows])
    return flags


def _pattern(marks: Sequence[int]) -> str:
    """Write marks per layer as the list expression that Megatron-LM evaluates."""
    runs = [(mark, len(list(group))) for mark, group in itertools.groupby(marks)]
    return "(" + "+".join(f"[{mark}]*{count}" for mark, count in runs) + ")"


def _expert_flags(blocks: Sequence[BlockSpec], job: Job) -> Flags:
    moe = next((block.moe for block in blocks if block.moe is not None), None)
    if moe is None:
        return {}
    router = moe.router
    flags: Flags = {
        "num-experts": moe.experts,
        "moe-router-topk": moe.experts_per_token,
        "moe-ffn-hidden-size": moe.hidden,
        "moe-grouped-gemm": job.precision.parameters is Dtype.BF16,  # its kernels know no other
    }
    marks = [int(block.moe is not None) for block in blocks]
    if not all(marks):
        flags["moe-layer-freq"] = _pattern(marks)
    if moe.shared_hidden:
        flags["moe-shared-expert-intermediate-size"] = moe.shared_hidden
    if router.scores == "sigmoid":
        flags["moe-router-score-function"] = "sigmoid"
    elif not is_normalised(moe):
        flags["moe-router-pre-softmax"] = True
    if router.scale != 1:
        flags["moe-router-topk-scaling-factor"] = float(router.scale)
    if router.correction != "none":
        flags["moe-router-enable-expert-bias"] = True
    if router.groups > 1:
        flags |= {
            "moe-router-num-groups": router.groups,
            "moe-router-group-topk": router.top_groups,
        }
    if router.jitter:
        flags["moe-input-jitter-eps"] = float(router.jitter)
    # Per sequence, so that no plan changes the training.
    balanced = router.balance_loss_on and router.balance_loss > 0
    flags["moe-router-load-balancing-type"] = "seq_aux_loss" if balanced else "none"
    if balanced:
        flags["moe-aux-loss-coeff"] = float(router.balance_loss * router.balance_share)
    return flags
