"""What transformers' `TrainingArguments` say, as the keys of a training file.

Fields have three fates: taken over, refused because they would change the result and tutti has
nothing like them, or ignored, which is said. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from tutti.errors import InputError

_SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "cosine_with_min_lr": "cosine",
    "constant": "constant", "constant_with_warmup": "constant", "warmup_stable_decay": "stable",
}  # fmt: skip
_OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_torch_xla": "adamw",
    "adamw_torch_npu_fused": "adamw", "adamw_apex_fused": "adamw", "adamw_hf": "adamw",
    "adamw_8bit": "adamw8bit", "adamw_bnb_8bit": "adamw8bit", "adamw_torch_8bit": "adamw8bit",
    "paged_adamw_8bit": "adamw8bit", "paged_adamw_32bit": "adamw",
    "lion_32bit": "lion", "paged_lion_32bit": "lion", "sgd": "sgd", "adafactor": "adafactor",
}  # fmt: skip
TAKEN = frozenset({
    "output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "gradient_accumulation_steps", "max_grad_norm",
    "bf16", "fp16", "eval_strategy", "eval_steps", "save_strategy", "save_steps",
    "save_total_limit", "seed", "data_seed", "do_train", "do_eval", "use_cpu",
    "dataloader_drop_last", "logging_steps", "logging_strategy", "logging_first_step",
    "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
    "dataloader_pin_memory",  # follows from the chips, there as here
})  # fmt: skip
REFUSED = {
    "label_smoothing_factor": "tutti's token loss has no label smoothing",
    "neftune_noise_alpha": "tutti adds no noise to embeddings",
    "optim_target_modules": "name tensors with optimizer.tensors in a training file",
    "optim_args": "give optimizer settings in a training file",
    "fp16_full_eval": "evaluation computes as training does",
    "bf16_full_eval": "evaluation computes as training does",
    "auto_find_batch_size": "the planner knows what fits; give the batch",
    "train_sampling_strategy": "rows come in tutti's own seeded order",
    "label_names": "labels are in the field 'labels'",
    "average_tokens_across_devices": "a step's loss is the mean over all tokens of its batch",
    "ignore_data_skip": "a resumed run goes on at the sample where it stopped",
}


class Lengths(NamedTuple):
    """How long a run is."""

    steps: int
    epoch: int  # steps of one


def changed(args: Any) -> set[str]:
    """Return the fields that differ from their defaults."""
    names = set()
    usual = type(args)(output_dir=args.output_dir)
    for field in dataclasses.fields(args):
        value, default = getattr(args, field.name), getattr(usual, field.name)
        if value != default:
            names.add(field.name)
    return names


def ignored_fields(args: Any) -> tuple[str, ...]:
    """Return the fields that were set and that do nothing here; refuse those that must not."""
    given = changed(args)
    for name in sorted(given & REFUSED.keys()):
        raise _would_change(name, getattr(args, name), f"{REFUSED[name]}; leave it out")
    return tuple(sorted(given - TAKEN))


def _would_change(name: str, value: object, why: str) -> InputError:
    return InputError(f"TrainingArguments: {name}={value!r} would change the result, and {why}")


def batch_of(args: Any, chips: int) -> int:
    """Return the examples of a step."""
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * chips)


def training_keys(args: Any, *, chips: int) -> dict[str, Any]:
    """Return the keys of a training file that do not depend on how many rows there are."""
    optimizer = _text(args.optim)
    if optimizer not in _OPTIMIZERS:
        raise InputError(
            f"TrainingArguments: optim={optimizer!r} is not there; known: {', '.join(_OPTIMIZERS)}"
        )
    if optimizer == "sgd" and args.weight_decay:
        why = "tutti's decay is beside the gradient, torch's SGD has it in it; give 0"
        raise _would_change("weight_decay", args.weight_decay, why)
    for name in ("eval_strategy", "save_strategy"):
        if _text(getattr(args, name)) == "best":
            raise _would_change(name, "best", "tutti knows 'no', 'steps' and 'epoch'")
    if args.load_best_model_at_end:
        _require_loss(args)
    return {
        "output": str(args.output_dir),
        "seed": args.seed,
        "job": {"global_batch": batch_of(args, chips), "precision": _precision(args)},
        "optimizer": {
            "name": _OPTIMIZERS[optimizer],
            "learning_rate": args.learning_rate,
            "first_step": 0,
            "weight_decay": args.weight_decay,
            "beta1": args.adam_beta1,
            "beta2": args.adam_beta2,
            "epsilon": args.adam_epsilon,
            "clip_norm": args.max_grad_norm or None,
            **_schedule(args),
        },
        "checkpoints": {"keep": args.save_total_limit or 2},
    }


def _require_loss(args: Any) -> None:
    """Refuse a best model by anything but the lowest loss, which is all that tutti takes."""
    metric = args.metric_for_best_model
    if metric not in (None, "loss", "eval_loss"):
        why = "tutti takes the loss alone on held rows; leave it out"
        raise _would_change("metric_for_best_model", metric, why)
    if args.greater_is_better:
        raise _would_change("greater_is_better", True, "the best loss is the lowest; leave it out")


def lengths_of(args: Any, *, rows: int, batch: int) -> Lengths:
    """Return how many steps a run has, and an epoch of so many rows."""
    epoch = max(1, rows // batch if args.dataloader_drop_last else -(-rows // batch))
    given = args.max_steps > 0
    return Lengths(args.max_steps if given else math.ceil(epoch * args.num_train_epochs), epoch)


def timed_keys(args: Any, lengths: Lengths, *, has_held: bool) -> dict[str, Any]:
    """Return the keys that depend on how long a run is."""
    given = args.warmup_steps
    warm = math.ceil(given * lengths.steps) if 0 < given < 1 else int(given)
    if _text(args.lr_scheduler_type) == "constant":
        warm = 0  # transformers has it without any
    keys: dict[str, Any] = {"steps": lengths.steps, "optimizer.warmup_steps": warm}
    keys["checkpoints.every"] = _every(args.save_strategy, args.save_steps, lengths)
    if has_held:
        every = _every(args.eval_strategy, args.eval_steps or args.logging_steps, lengths)
        keys["validation.every"] = every or lengths.steps  # at the end, for evaluate() to return
    return keys


def log_every(args: Any, lengths: Lengths) -> int:
    """Return the steps between two lines of a log; 0: none."""
    return _every(args.logging_strategy, args.logging_steps, lengths)


def _every(strategy: Any, steps: float, lengths: Lengths) -> int:
    """Return the steps between two times that something is due; 0: never."""
    kind = _text(strategy)
    if kind == "epoch":
        return lengths.epoch
    if kind != "steps" or not steps:
        return 0
    return math.ceil(steps * lengths.steps) if steps < 1 else int(steps)


def _schedule(args: Any) -> dict[str, Any]:
    """Return how the learning rate moves; what a schedule is told beside its name, too."""
    name, told = _text(args.lr_scheduler_type), dict(args.lr_scheduler_kwargs or {})
    if name not in _SCHEDULES:
        raise InputError(
            f"TrainingArguments: lr_scheduler_type={name!r} is not there; "
            f"known: {', '.join(sorted(_SCHEDULES))}"
        )
    schedule: dict[str, Any] = {"schedule": _SCHEDULES[name], "final_share": 0.0}
    if name == "cosine_with_min_lr":
        least = told.pop("min_lr", None)
        share = told.pop("min_lr_rate", None)
        schedule["final_share"] = share if least is None else least / args.learning_rate
        if schedule["final_share"] is None:
            raise InputError(
                "TrainingArguments: cosine_with_min_lr needs lr_scheduler_kwargs with 'min_lr' or "
                "'min_lr_rate'"
            )
    if name == "warmup_stable_decay":
        if told.pop("decay_type", "cosine") != "linear":
            why = "tutti's last steps are linear; say so with 'decay_type': 'linear'"
            raise _would_change("lr_scheduler_kwargs", args.lr_scheduler_kwargs, why)
        schedule["decay_steps"] = told.pop("num_decay_steps", None)
    if told:
        why = f"tutti has nothing like {', '.join(sorted(told))}; leave it out"
        raise _would_change("lr_scheduler_kwargs", args.lr_scheduler_kwargs, why)
    return schedule


def _precision(args: Any) -> str:
    if args.bf16:
        return "bf16"
    return "fp16" if args.fp16 else "fp32"


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))
