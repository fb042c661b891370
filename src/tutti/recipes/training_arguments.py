"""What transformers' `TrainingArguments` say, as the keys of a training file.

Fields have three fates: taken over, refused because they would change the result and tutti has
nothing like them, or ignored, which is said. Needs no torch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tutti.errors import InputError

_SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant",
    "constant_with_warmup": "constant", "warmup_stable_decay": "stable",
}  # fmt: skip
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_hf", "sgd")
TAKEN = frozenset({
    "output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate",
    "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "gradient_accumulation_steps", "max_grad_norm", "bf16", "fp16",
    "eval_strategy", "eval_steps", "save_strategy", "save_steps", "save_total_limit", "seed",
    "data_seed", "do_train", "do_eval", "use_cpu",
    "dataloader_pin_memory",  # follows from the chips, there as here
})  # fmt: skip
REFUSED = {
    "label_smoothing_factor": "tutti's token loss has no label smoothing",
    "neftune_noise_alpha": "tutti adds no noise to embeddings",
    "optim_target_modules": "name tensors with optimizer.tensors in a training file",
    "optim_args": "give optimizer settings in a training file",
    "lr_scheduler_kwargs": "give the schedule in a training file",
    "fp16_full_eval": "evaluation computes as training does",
    "bf16_full_eval": "evaluation computes as training does",
    "auto_find_batch_size": "the planner knows what fits; give the batch",
    "train_sampling_strategy": "rows come in tutti's own seeded order",
    "label_names": "labels are in the field 'labels'",
}


def changed(args: Any) -> set[str]:
    """Return the fields that differ from their defaults."""
    found = set()
    usual = type(args)(output_dir=args.output_dir)
    for field in dataclasses.fields(args):
        value, default = getattr(args, field.name), getattr(usual, field.name)
        if value != default:
            found.add(field.name)
    return found


def ignored_fields(args: Any) -> tuple[str, ...]:
    """Return the fields that were set and that do nothing here; refuse those that must not."""
    given = changed(args)
    for name in sorted(given & REFUSED.keys()):
        raise InputError(
            f"TrainingArguments: {name}={getattr(args, name)!r} would change the result, and "
            f"{REFUSED[name]}; leave it out"
        )
    return tuple(sorted(given - TAKEN))


def training_keys(args: Any, *, chips: int) -> dict[str, Any]:
    """Return the keys of a training file; steps are left to who knows how many rows there are."""
    schedule, optimizer = _text(args.lr_scheduler_type), _text(args.optim)
    if schedule not in _SCHEDULES:
        raise InputError(
            f"TrainingArguments: lr_scheduler_type={schedule!r} is not there; "
            f"known: {', '.join(sorted(_SCHEDULES))}"
        )
    if optimizer not in _OPTIMIZERS:
        raise InputError(
            f"TrainingArguments: optim={optimizer!r} is not there; known: {', '.join(_OPTIMIZERS)}"
        )
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * chips
    keys: dict[str, Any] = {
        "output": str(args.output_dir),
        "seed": args.seed,
        "job": {"global_batch": batch, "precision": _precision(args)},
        "optimizer": {
            "name": "sgd" if optimizer == "sgd" else "adamw",
            "learning_rate": args.learning_rate,
            "schedule": _SCHEDULES[schedule],
            "final_share": 0.0,
            "weight_decay": args.weight_decay,
            "beta1": args.adam_beta1,
            "beta2": args.adam_beta2,
            "epsilon": args.adam_epsilon,
            "clip_norm": args.max_grad_norm or None,
        },
        "checkpoints": {"keep": args.save_total_limit or 2},
    }
    if _text(args.save_strategy) == "steps" and args.save_steps >= 1:
        keys["checkpoints"]["every"] = int(args.save_steps)
    if _text(args.eval_strategy) == "steps" and (args.eval_steps or 0) >= 1:
        keys["validation"] = {"every": int(args.eval_steps)}
    return keys


def warmup_steps(args: Any, steps: int) -> int:
    """Return the steps of the warm-up; below 1 it is a share of all."""
    given = args.warmup_steps
    return round(given * steps) if 0 < given < 1 else int(given)


def _precision(args: Any) -> str:
    if args.bf16:
        return "bf16"
    return "fp16" if args.fp16 else "fp32"


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))
