"""Tiny engines, and what transformers generates from the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tests.support.engines import engine_of as engine_of
from tests.support.parity import hf_model, our_model, parity_config
from tutti.models import ModelSpec, read_config
from tutti.nn import Model

TIE = 1e-5  # logits that near are as good as equal


class Pair(NamedTuple):
    """transformers' model and ours, with the same weights."""

    name: str
    hf: Any
    spec: ModelSpec
    model: Model


_made: dict[str, Pair] = {}


def pair(name: str) -> Pair:
    if name not in _made:
        values = parity_config(name)
        spec = read_config(values, name)
        hf = hf_model(name, values)
        _made[name] = Pair(name, hf, spec, our_model(hf, spec).eval().requires_grad_(False))
    return _made[name]


@torch.no_grad()
def reference(found: Pair, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """What transformers takes for the likeliest tokens, and how far ahead of the next each was."""
    hf = _fresh(found.hf)
    longrope = any(
        b.attention.rotary and b.attention.rotary.scaling
        and b.attention.rotary.scaling.kind == "longrope"
        for b in found.spec.blocks
    )  # fmt: skip
    out = hf.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        # with a cache some types keep short keys when they go over to long ones
        use_cache=not longrope,
        return_dict_in_generate=True,
        output_logits=True,
        eos_token_id=None,
    )
    gaps = []
    for logits in out.logits:
        best = logits[0].topk(2).values
        gaps.append(float(best[0] - best[1]))
    return out.sequences[0, len(prompt) :].tolist(), gaps


def _fresh(hf: Any) -> Any:
    """Take back what dynamic rotary scaling remembers of longer sequences."""
    for module in hf.modules():
        if hasattr(module, "max_seq_len_cached") and hasattr(module, "original_inv_freq"):
            module.max_seq_len_cached = module.original_max_seq_len
            module.register_buffer("inv_freq", module.original_inv_freq.clone(), persistent=False)
    return hf


def same(ours: Sequence[int], theirs: Sequence[int], gaps: Sequence[float]) -> bool:
    """Equal, or another way taken where two tokens were as good as equal."""
    for own, other, gap in zip(ours, theirs, gaps, strict=False):
        if own != other:
            return gap <= TIE
    return len(ours) == len(theirs)
