"""Tiny random transformers models and ours with the same weights, and what both compute."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch.nn import functional

from tests.support.models import zero_gradients as zero_gradients
from tests.support.tiny_configs import TINY as TINY
from tests.support.tiny_configs import tiny_config
from tutti.accelerator.operators import Operators
from tutti.huggingface import open_checkpoint
from tutti.models import ModelSpec
from tutti.nn import Batch, Model, load

LENGTHS = (31, 17)  # longer than windows and than the lengths that rotary scalings begin at
WINDOW = 8

# Options that tiny sequences would not reach, or that the tiny configs leave at large defaults.
OTHERWISE: dict[str, dict[str, Any]] = {
    "llama/dynamic": {"max_position_embeddings": 16},
    "internlm3/bias": {"max_position_embeddings": 16},
    "phi3/long": {
        "original_max_position_embeddings": 20,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 2.5, 3.0, 3.5],
        },
    },
    "phimoe/long": {
        "original_max_position_embeddings": 20,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 2.5, 3.0, 3.5],
            "short_mscale": 1.25,
            "long_mscale": 1.25,
            "original_max_position_embeddings": 20,
        },
    },
    "minicpm3/small": {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 2.0],
            "long_factor": [1.5, 2.5],
            "original_max_position_embeddings": 20,
        }
    },
}
# transformers' eager Falcon adds ALiBi to the scores and once more through the mask
IMPLEMENTATION = {"falcon/alibi": "sdpa"}
WINDOWED = ("mistral", "qwen2/window", "qwen2_moe/sparse", "qwen3_moe/sparse", "mixtral/4")
WINDOWED += ("gemma2", "gemma2/types", "gemma3_text", "gemma3_text/pattern", "phi3/long")
WINDOWED += ("gpt_oss", "gpt_oss/plain", "smollm3/window", "exaone4", "cohere2", "cohere2/types")
WINDOWED += ("olmo3", "olmo3/yarn", "dots1/sparse", "phimoe/long")


def parity_config(name: str) -> dict[str, Any]:
    """Return a tiny config whose windows and scalings are in reach of `LENGTHS`."""
    values: dict[str, Any] = {**tiny_config(name), "pad_token_id": 0}
    if name in WINDOWED:
        values["sliding_window"] = WINDOW
    values.update(copy.deepcopy(OTHERWISE.get(name, {})))
    return values


def hf_model(name: str, values: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """Return a transformers model in which no parameter is at its trivial first value."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**{"pad_token_id": 0, **values})
    model = transformers.AutoModelForCausalLM.from_config(
        config,
        dtype=torch.float32,
        attn_implementation=IMPLEMENTATION.get(name, "eager"),
        experts_implementation="eager",
    )
    saved = model.state_dict()
    buffers = [tensor for name, tensor in model.named_buffers() if name in saved]
    with torch.no_grad():
        for tensor in (*model.parameters(), *buffers):
            if tensor.dim() > 1:
                tensor.normal_(0, min(0.08, 0.64 * tensor.shape[-1] ** -0.5))
            else:
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
    if name == "phimoe/long":
        tell_length(model.model.rotary_emb)
    return model.to(dtype).eval()


def tell_length(rotary: Any) -> None:
    """Let longrope know how long the text is: transformers' Phi-3.5-MoE forgets to, its authors'
    code does not, and without it the long factors are never used.
    """
    lengths: list[int] = []
    plain = rotary.rope_init_fn
    rotary.register_forward_pre_hook(
        lambda _, args, options: lengths.append(
            int((options["position_ids"] if "position_ids" in options else args[1]).max()) + 1
        ),
        with_kwargs=True,
    )
    rotary.rope_init_fn = lambda config: plain(config, seq_len=lengths[-1])


def our_model(hf: Any, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Model:
    """Return our model with the weights that transformers saves."""
    with tempfile.TemporaryDirectory() as folder:
        hf.save_pretrained(folder)
        model = Model(spec, Operators("cpu"), dtype=dtype)
        load(model, open_checkpoint(folder))
    return model


class Result(NamedTuple):
    """What one side computes of a packed batch."""

    logits_tv: torch.Tensor
    loss: float
    gradients: dict[str, torch.Tensor]


def tokens_and_targets(
    vocab: int, lengths: Sequence[int] = LENGTHS
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocab, (sum(lengths),), generator=generator)
    targets = torch.randint(0, vocab, (sum(lengths),), generator=generator)
    targets[3] = -100
    tokens[5] = 0  # padding: its row gets no gradient for it
    return tokens, targets


def run_ours(
    model: Model, tokens: torch.Tensor, targets: torch.Tensor, lengths: Sequence[int]
) -> Result:
    model.zero_grad(set_to_none=True)
    batch = Batch.of(model.spec, tokens, lengths, targets_t=targets)
    out = model(None, batch)
    assert out.loss is not None
    (out.loss / len(tokens)).backward()
    gradients = {}
    for logical in model.logical_tensors():
        if logical.piece.parameter.trainable:
            assert logical.gradient is not None, logical.name
            gradients[logical.name] = logical.gradient.clone()
    with torch.no_grad():
        logits = model.logits(batch)
    return Result(logits, float(out.loss.detach()), gradients)


def run_hf(
    hf: Any, spec: ModelSpec, tokens: torch.Tensor, targets: torch.Tensor, lengths: Sequence[int]
) -> Result:
    """Run each sequence by itself and add the losses up; gradients arrive under our names.

    Short ones go first: transformers' dynamic rotary scaling keeps the longest length it has seen.
    """
    hf.zero_grad(set_to_none=True)
    logits, loss = [torch.empty(0)] * len(lengths), 0.0
    each = list(zip(tokens.split(list(lengths)), targets.split(list(lengths)), strict=True))
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        own, wanted = each[i]
        found = hf(input_ids=own.unsqueeze(0), use_cache=False).logits[0]
        part = functional.cross_entropy(found, wanted, reduction="sum", ignore_index=-100)
        (part / len(tokens)).backward()
        logits[i] = found.detach()
        loss += float(part.detach())
    twin = copy.deepcopy(hf)
    with torch.no_grad():
        for target, source in zip(twin.parameters(), hf.parameters(), strict=True):
            target.copy_(torch.zeros_like(target) if source.grad is None else source.grad)
    with tempfile.TemporaryDirectory() as folder:
        twin.save_pretrained(folder)
        checkpoint = open_checkpoint(folder)
        gradients = {
            f"{unit}.{parameter.name}": checkpoint.read(f"{unit}.{parameter.name}")
            for unit in range(spec.num_units)
            for parameter in spec.parameters(unit)
            if parameter.trainable and parameter.tied_to is None
        }
    return Result(torch.cat(logits), loss, gradients)


def differences(
    ours: Result, theirs: Result, zero: Collection[str] = ()
) -> tuple[float, dict[str, float]]:
    """Return the largest difference of logits, and of each gradient relative to its norm."""
    assert ours.gradients.keys() == theirs.gradients.keys()
    relative = {}
    for name, expected in theirs.gradients.items():
        against = name.replace(".key.", ".query.") if name in zero else name
        norm = float(theirs.gradients[against].norm())
        error = float((ours.gradients[name] - expected).norm())
        relative[name] = error / norm if norm else error
    return float((ours.logits_tv - theirs.logits_tv).abs().max()), relative
