"""`Trainer` with the interface of transformers': an existing script changes one import.

from tutti.transformers import Trainer
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tutti import files
from tutti.document import Place, build
from tutti.errors import InputError
from tutti.optional_imports import library
from tutti.recipes.callbacks import TrainerCallbacks
from tutti.recipes.dataset_rows import rows_of
from tutti.recipes.training_arguments import (
    Lengths,
    batch_of,
    ignored_fields,
    lengths_of,
    timed_keys,
    training_keys,
)
from tutti.train.data.open_data import open_data
from tutti.train.data.rows_in_memory import rows_file, tokenizer_of
from tutti.train.run.config import TrainConfig, with_changes
from tutti.train.run.planning import cluster_of
from tutti.train.run.result import TrainResult
from tutti.train.run.starting import Resume
from tutti.train.run.trainer import Trainer as Job

Rows = Iterable[Mapping[str, Any]]
_OWN = {  # arguments of transformers' Trainer that would change the result
    "compute_loss_func": "losses are named by 'objective' in a training file",
    "optimizers": "name one in TrainingArguments.optim",
    "optimizer_cls_and_kwargs": "name one in TrainingArguments.optim",
    "model_init": "give the model",
}
_NO_EFFECT = ("compute_metrics", "preprocess_logits_for_metrics")


class TrainOutput(NamedTuple):
    """What transformers' `train` returns."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class Trainer:
    """Trains a Hugging Face model on a cluster of unlike chips.

    `cluster`, and any key of a training file (`job`, `tuning`, `objective`, …), may be given beside
    what transformers knows. Rows of tokens lie each in a row of its own, so that a batch is as many
    examples as in transformers; `data={"packing": {"kind": "fit"}}` packs them. `sequence_length`
    is that of the rows; by default the longest example's, or what the model was made for.
    """

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        callbacks: Sequence[Any] | None = None,
        cluster: str | os.PathLike[str] = "here",
        sequence_length: int | None = None,
        **others: Any,
    ) -> None:
        transformers = library("transformers", "tutti.transformers", "huggingface")
        self.args = args or transformers.TrainingArguments("trainer_output")
        for name, why in _OWN.items():
            if others.pop(name, None) not in (None, (None, None)):
                raise InputError(f"Trainer: '{name}' would change the result, and {why}")
        unheard = [name for name in _NO_EFFECT if others.pop(name, None) is not None]
        self.ignored = (*ignored_fields(self.args), *unheard)
        if self.ignored:
            sys.stderr.write(f"tutti: ignored: {', '.join(self.ignored)}\n")
        if train_dataset is None:
            raise InputError(
                "Trainer: 'train_dataset' is missing; give rows, or a datasets.Dataset"
            )
        self.processing_class = processing_class
        self._given = None if isinstance(model, (str, os.PathLike)) else model
        self.callbacks = TrainerCallbacks(self.args, callbacks)
        self._folder = self._model_folder(model, processing_class)
        self._chips = self._count_chips(cluster, others)
        most = max(0, self.args.max_steps) * batch_of(self.args, self._chips)
        streamed = 0 if hasattr(train_dataset, "__len__") else most
        self._rows = rows_of(train_dataset, data_collator, most=streamed, what="train_dataset")
        self._held = rows_of(eval_dataset, data_collator, most=0, what="eval_dataset")
        if not self._rows:
            raise InputError("Trainer: 'train_dataset' is empty")
        config, self._lengths = self._timed(self._config(cluster, sequence_length, others))
        self._job = Job(config)
        self.result: TrainResult | None = None

    def _model_folder(self, model: Any, tokenizer: Any) -> str:
        """Return a folder with the model; one that lives in memory is written first."""
        if isinstance(model, (str, os.PathLike)):
            return os.fspath(model)
        if hasattr(model, "peft_config"):
            raise InputError(
                "Trainer: the model has adapters of peft; give the model without them, and "
                "tuning={'adapter': {'rank': 16}}"
            )
        folder = Path(f"{self.args.output_dir}-model")
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        return str(folder)

    def _count_chips(self, cluster: str | os.PathLike[str], others: Mapping[str, Any]) -> int:
        plain = {"model": self._folder, "cluster": os.fspath(cluster)}
        if "ranks" in others:
            plain["ranks"] = others["ranks"]
        data = {"train": [{"kind": "synthetic"}]}
        return cluster_of(build(TrainConfig, {**plain, "data": data}, Place("Trainer"))).num_chips

    def _config(
        self, cluster: str | os.PathLike[str], length: int | None, others: Mapping[str, Any]
    ) -> TrainConfig:
        output = Path(self.args.output_dir)
        sources = [str(rows_file(rows, output)) for rows in (self._rows, self._held) if rows]
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        data: dict[str, Any] = {"train": sources[:1], "seed": seed}
        data["tokenizer"] = tokenizer_of(self._rows, "")
        if self._held:
            data["validation"] = sources[1:]
        lengths = [len(row["input_ids"]) for row in self._rows if "input_ids" in row]
        if len(lengths) == len(self._rows):
            data["packing"] = {"kind": "apart"}
        plain: dict[str, Any] = {"model": self._folder, "cluster": os.fspath(cluster), "data": data}
        keys = plain | training_keys(self.args, chips=self._chips)
        for name, value in others.items():
            both = isinstance(value, Mapping) and isinstance(keys.get(name), dict)
            keys[name] = {**keys[name], **value} if both else value
        if length is None and lengths:
            length = max(lengths)
        if length is not None:
            keys["job"] = {"sequence_length": length, **keys["job"]}
        return build(TrainConfig, keys, Place("Trainer"))

    def _timed(self, config: TrainConfig) -> tuple[TrainConfig, Lengths]:
        """Return the job with its steps: as given, or so many that all rows are seen."""
        from tutti.models.load import load_model

        spec = load_model(config.model)
        length = config.job.sequence_length or min(4096, spec.max_length)
        data = open_data(
            config.data,
            sequence_length=length,
            vocabulary=spec.vocab,
            model_folder=Path(config.model),
            objective=config.objective,
        )
        rows = sum(part.count for part in data.train.parts)
        batch = config.job.global_batch
        assert batch is not None, "the arguments give one"
        lengths = lengths_of(self.args, rows=rows, batch=batch)
        held = 0 if data.validation is None else data.validation.num_steps(batch)
        keys = timed_keys(self.args, lengths, has_held=bool(held))
        keys |= {"job.sequence_length": length}
        if held:
            keys["validation.steps"] = held  # all of them, as transformers does
        return with_changes(config, keys), lengths

    @property
    def config(self) -> TrainConfig:
        """The training file that the arguments come to."""
        return self._job.config

    @property
    def state(self) -> Any:
        """Steps, epochs and the log, as transformers keeps them."""
        return self.callbacks.state

    def add_callback(self, callback: Any) -> None:
        """Let one more callback hear."""
        self.callbacks.add(callback)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train; `resume_from_checkpoint` goes on in the output folder.

        From the newest checkpoint (true), or from the one whose step a folder's name ends with.
        """
        self.callbacks.begin(self._lengths)
        resume = _resumed(resume_from_checkpoint)
        found = self._job.fit(resume=resume, listener=self.callbacks.hear)
        if not found.finished and self.callbacks.control.should_training_stop:
            # a callback ended the run: its last step is the model's
            found = self._ended(found)
        self.result = self._with_best(found) if self.args.load_best_model_at_end else found
        self._take_over()
        self.callbacks.end()
        losses = self.callbacks.losses
        mean = sum(losses) / max(1, len(losses))
        metrics = {"train_loss": mean, "mfu": found.mfu, "epoch": found.steps / self._lengths.epoch}
        if found.seconds_per_step:
            metrics["train_steps_per_second"] = 1.0 / found.seconds_per_step
        return TrainOutput(found.steps, mean, metrics)

    def _ended(self, found: TrainResult) -> TrainResult:
        """Return a run with what is written after its last step, which was meant to come later.

        No step is made for it, so losses and speeds are the run's; the trainer keeps its own steps.
        """
        last = copy.copy(self._job).fit(steps=found.steps, resume=True)
        names = ("checkpoint", "huggingface", "adapter", "best", "finished", "stopped_by")
        return replace(found, **{name: getattr(last, name) for name in names})

    def _with_best(self, found: TrainResult) -> TrainResult:
        """Return a run whose folder holds the checkpoint of the lowest loss on held rows."""
        if found.best is None or found.best == found.checkpoint or not self.is_world_process_zero():
            return found
        from tutti.train.checkpoint.adapters import export_adapter
        from tutti.train.checkpoint.huggingface import export_hf

        name = "huggingface" if found.adapter is None else "adapter"
        target = found.output / name
        fresh = target.with_name(f".{name}.best")
        shutil.rmtree(fresh, ignore_errors=True)
        if found.adapter is None:
            export_hf(found.best, fresh)
        else:
            export_adapter(found.best, fresh, base=Path(self._folder))
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
        return found

    def _take_over(self) -> None:
        """Give the script's own model the trained weights, as transformers trains it in place."""
        if self._given is not None and self._trained().huggingface is not None:
            self._given.load_state_dict(self._trained().model().state_dict())

    def evaluate(self) -> dict[str, float]:
        """Return the loss on the held rows that is the model's: the newest, or the lowest.

        It is taken when `eval_strategy` says, and at the end where it says never.
        """
        if self.result is None:
            raise InputError(
                "evaluate: nothing is trained yet; train() takes the loss on eval_dataset, and "
                "`tutti evaluate` that of a folder"
            )
        if not self.result.validation:
            raise InputError("evaluate: no loss on held rows was taken; give eval_dataset")
        told = self.result.validation
        best = self.args.load_best_model_at_end
        step, loss = min(told, key=lambda one: one[1]) if best else told[-1]
        return {"eval_loss": loss, "epoch": step / self._lengths.epoch, "step": step}

    @property
    def model(self) -> Any:
        """The trained model, as transformers has it; the script's own where it gave one."""
        adapters = self.result is not None and self.result.huggingface is None
        return self._trained().model() if self._given is None or adapters else self._given

    def is_world_process_zero(self) -> bool:
        """Tell whether this process is the one that writes."""
        return int(os.environ.get("RANK", "0")) == 0

    def is_local_process_zero(self) -> bool:
        """Tell whether this process is the first of its host."""
        return int(os.environ.get("LOCAL_RANK", "0")) == 0

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Write the trained model (or its adapters) into a folder."""
        found = self._trained()
        source = found.huggingface or found.adapter
        if source is None:
            raise InputError("the run wrote no folder for transformers")
        target = Path(output_dir or self.args.output_dir)
        shutil.copytree(source, target, dirs_exist_ok=True)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(target)

    def create_model_card(self, **words: Any) -> None:
        """Write what was trained on what, and to which loss, beside the model."""
        found, name = self._trained(), words.get("model_name") or Path(self.args.output_dir).name
        lines = [
            f"# {name}",
            "",
            f"Trained by tutti from {words.get('finetuned_from') or self._folder}:",
        ]
        lines.append(f"{found.steps} steps of {self.config.job.global_batch} rows.")
        lines += [
            f"Loss on held rows {loss:.4f} at step {step}." for step, loss in found.validation[-1:]
        ]
        files.write_text(Path(self.args.output_dir) / "README.md", "\n".join(lines) + "\n")

    def push_to_hub(self, *arguments: Any, **words: Any) -> None:
        """Write the model and say that nothing was uploaded."""
        del arguments, words
        self.save_model()
        sys.stderr.write(
            f"tutti: push_to_hub uploads nothing; the model is in {self.args.output_dir}, and "
            "`hf upload` sends it\n"
        )

    def log_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Print figures."""
        for name, value in sorted(metrics.items()):
            sys.stdout.write(f"{split}: {name} = {value:.6g}\n")

    def save_metrics(self, split: str, metrics: Mapping[str, float], combined: bool = True) -> None:
        """Write figures where scripts of transformers look for them."""
        folder = Path(self.args.output_dir)
        files.write_text(folder / f"{split}_results.json", json.dumps(dict(metrics), indent=4))
        if combined:
            path = folder / "all_results.json"
            before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            files.write_text(path, json.dumps({**before, **metrics}, indent=4))

    def save_state(self) -> None:
        """Write the state's log; what a resumed run needs is in its checkpoints."""
        self.state.save_to_json(str(Path(self.args.output_dir) / "trainer_state.json"))

    def __getattr__(self, name: str) -> Any:
        known = [own for own in dir(type(self)) if not own.startswith("_")]
        raise AttributeError(
            f"tutti.transformers.Trainer has no '{name}'; it has {', '.join(known)}"
        )

    def _trained(self) -> TrainResult:
        if self.result is None:
            raise InputError("Trainer: nothing is trained yet; call train() first")
        return self.result


def _resumed(given: bool | str | os.PathLike[str] | None) -> Resume:
    """Return from where a run goes on."""
    if given is None or isinstance(given, bool):
        return bool(given)
    number = re.search(r"(\d+)$", os.fspath(given).rstrip("/"))
    if number is None:
        raise InputError(
            f"train: resume_from_checkpoint is '{given}'; give True, or a folder such as "
            "checkpoints/step-000100"
        )
    return int(number[1])


__all__ = ["TrainOutput", "Trainer"]
