"""Adapters trained by `peft` in a plain loop, and by tutti under a plan, on the same tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.hf_models import saved, tiny_model
from tests.support.plans import Allocator
from tests.support.threads import World
from tests.support.tiny_configs import TINY
from tests.support.training import batches_of, in_fp32, sample, settings, whole_tensors
from tutti.accelerator import open_accelerator
from tutti.accelerator.quantised import frozen
from tutti.huggingface import open_checkpoint
from tutti.huggingface.peft.writing import write_adapter
from tutti.models.load import load_model
from tutti.models.spec import ModelSpec
from tutti.models.tuning import AdapterSpec, Tuning, is_adapter
from tutti.nn.initialize import begin_magnitudes, first_factor
from tutti.nn.model import Model
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import Job
from tutti.plan.plan import ExpertGroup, Pipeline, Plan, Replica, Share, Stage, Synchronisation
from tutti.train.checkpoint.huggingface import load_hf
from tutti.train.engine.engine import Engine
from tutti.train.run.planning import tuned

LENGTH, BATCH, SEED = 16, 8, 5
MODELS = ("llama/gqa", "qwen3", "mixtral/4", "gemma2")
ATTENTION = ("attention.*",)


def folder_of(name: str, folder: Path) -> Path:
    """Return a tiny model's folder."""
    return saved(tiny_model(dict(TINY[name])), folder)


def tunings(name: str) -> dict[str, Tuning]:
    """Return LoRA on every linear layer, experts included, and DoRA where it has a form."""
    lora = AdapterSpec(rank=4, alpha=8.0)
    targets = ATTENTION if name.startswith("mixtral") else lora.targets
    return {
        "lora": Tuning(adapter=lora),
        "dora": Tuning(adapter=replace(lora, method="dora", targets=targets)),
    }


def tuned_spec(folder: Path, tuning: Tuning) -> ModelSpec:
    spec = load_model(str(folder))
    balance = False if spec.num_experts else None
    return tuned(spec.with_training(balance=balance), tuning)


# --- plans -------------------------------------------------------------------------------------


def plans(spec: ModelSpec) -> dict[str, Plan]:
    """Return five plans: stages, slices, unequal shares, sharded state, experts (or more)."""
    last = spec.num_units
    whole = ((0, last),)
    first, second = ((0, 3),), ((3, last),)
    found = {
        "pipeline": _plan(spec, [(first, [{"sequences": 2}]), (second, [{"sequences": 2}])], 4),
        "tensor": _plan(spec, [(whole, [{"tp": 2, "sequences": 4}])], 2),
        "shares 3:1": _plan(
            spec, [(whole, [{"sequences": 3}, {"sequences": 1, "pool": "slow"}])], 2,
            Synchronisation(units=(0, last), shard_level=1, shares=(
                Share(pipeline=0, stage=0, replica=0, weight=3),
                Share(pipeline=0, stage=0, replica=1, weight=1))),
        ),
        "zero 2": _plan(
            spec, [(whole, [{"count": 2, "sequences": 2}])], 2,
            Synchronisation(units=(0, last), shard_level=2),
        ),
    }  # fmt: skip
    if spec.num_experts:
        groups = {0: (ExpertGroup(chips=2, experts=(spec.num_experts - 1, 1)),)}
        row = [(whole, [{"count": 2, "sequences": 2}])]
        found["experts"] = _plan(spec, row, 2, experts=groups)
    else:
        rows = [(first, [{"count": 2, "sequences": 2}]),
                (second, [{"tp": 2, "sequence_parallel": True, "sequences": 4}])]  # fmt: skip
        found["level 3 into tensor parallel"] = _plan(
            spec, rows, 2, Synchronisation(units=(0, 3), shard_level=3)
        )
    return found


def _plan(
    spec: ModelSpec,
    rows: list[Any],
    micro_batches: int,
    *rules: Synchronisation,
    experts: dict[int, Any] | None = None,
) -> Plan:
    chips = Allocator()
    stages = []
    for number, (units, replicas) in enumerate(rows):
        made = []
        for words in replicas:
            words = dict(words)
            pool = words.pop("pool", "fast")
            width = words.get("tp", 1) * words.get("count", 1)
            made.append(Replica(chips=chips.take(pool, width), **words))
        stages.append(
            Stage(units=units, replicas=tuple(made), experts=(experts or {}).get(number, ()))
        )
    line = Pipeline(
        micro_batch=BATCH // micro_batches, micro_batches=micro_batches, stages=tuple(stages)
    )
    plan = Plan(
        model=refer_to_model(spec),
        cluster=refer_to_cluster(chips.cluster()),
        job=Job(sequence_length=LENGTH, global_batch=BATCH),
        pipelines=(line,),
        synchronisation=rules,
        tied_owner=0 if spec.head.tied and len(stages) > 1 else None,
    )
    return in_fp32(plan, "adamw")


# --- tutti -------------------------------------------------------------------------------------


def run_plan(
    plan: Plan, spec: ModelSpec, folder: Path, steps: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Train under a plan, ranks as threads; return losses and what was trained."""

    def one(links: Any) -> tuple[list[float], Any]:
        engine = Engine(plan, spec, links.rank, open_accelerator("cpu"), links, clip_norm=1.0)
        load_hf(engine, folder, seed=SEED)
        losses = [engine.step(batches_of(engine, s % 2), settings()).loss for s in range(steps)]
        return losses, engine.weights()

    ranks = World(plan.num_ranks).run(one)
    tensors = whole_tensors(spec, [part for _, parts in ranks for part in parts], "weights")
    return ranks[0][0], tensors


def first_adapters(spec: ModelSpec, folder: Path) -> dict[str, Tensor]:
    """Return the adapters that every run begins with."""
    model = Model(spec, open_accelerator("cpu").operators)
    source = open_checkpoint(folder)
    with torch.no_grad():
        for logical in model.logical_tensors():
            if is_adapter(logical.name):
                logical.view.copy_(first_factor(SEED, logical))
            else:
                logical.view.copy_(source.read(logical.name, logical.slices))
        begin_magnitudes(model)
    return {t.name: t.view.clone() for t in model.logical_tensors() if is_adapter(t.name)}


# --- peft --------------------------------------------------------------------------------------


def peft_model(
    spec: ModelSpec, folder: Path, tensors: dict[str, Tensor], target: Path, **words: Any
) -> Any:
    """Return the base with adapters, from a PEFT folder that is written here."""
    import peft
    import transformers

    write_adapter(target, spec, tensors, base=str(folder))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, str(target), **words)


def run_peft(spec: ModelSpec, folder: Path, target: Path, steps: int) -> tuple[list[float], Any]:
    """Train with peft, a plain loop and torch's AdamW; return losses and the model."""
    model = peft_model(spec, folder, first_adapters(spec, folder), target, is_trainable=True)
    given = settings()
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for n, p in trained if "magnitude" not in n],
            "weight_decay": given.weight_decay,
        },
        {"params": [p for n, p in trained if "magnitude" in n], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=given.learning_rate, betas=(given.beta1, given.beta2), eps=given.eps
    )
    losses = []
    for step in range(steps):
        rows = [sample(spec, step % 2, index, LENGTH) for index in range(BATCH)]
        tokens, targets = (torch.stack(side) for side in zip(*rows, strict=True))
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for _, p in trained], 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


# --- few bits ----------------------------------------------------------------------------------


def rounded_folder(name: str, kind: str, folder: Path) -> Path:
    """Return a tiny model whose blocks' linear weights are what few bits stand for."""
    model = tiny_model(dict(TINY[name]))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            linear = ".layers." in key and weight.dim() > 1 and not key.endswith("mlp.gate.weight")
            if linear:
                made = frozen(weight, kind)
                assert made is not None
                weight.copy_(made.dequantised(torch.float32))
    return saved(model, folder)
