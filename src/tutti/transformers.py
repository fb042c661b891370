"""`Trainer` with the interface of transformers': an existing script changes one import.

from tutti.transformers import Trainer
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tutti.document import Place, build
from tutti.errors import InputError
from tutti.optional_imports import library
from tutti.recipes.training_arguments import ignored_fields, training_keys, warmup_steps
from tutti.train.data.opening import open_data
from tutti.train.data.rows_in_memory import rows_file, tokenizer_of
from tutti.train.run.config import TrainConfig, with_changes
from tutti.train.run.planning import cluster_of
from tutti.train.run.result import TrainResult
from tutti.train.run.trainer import Trainer as Job

Rows = Iterable[Mapping[str, Any]]
_OWN = {  # arguments of transformers' Trainer that would change the result
    "data_collator": "examples are packed into rows by tutti; give them as rows",
    "compute_loss_func": "losses are named by 'objective' in a training file",
    "optimizers": "name one in TrainingArguments.optim",
    "optimizer_cls_and_kwargs": "name one in TrainingArguments.optim",
    "model_init": "give the model",
}


class TrainOutput(NamedTuple):
    """What transformers' `train` returns."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class Trainer:
    """Trains a Hugging Face model on a cluster of unlike chips.

    `cluster`, and any key of a training file (`job`, `tuning`, `objective`, …), may be given beside
    what transformers knows. `sequence_length` is that of the rows that examples are packed into; by
    default the longest example's, or what the model was made for.
    """

    def __init__(
        self,
        model: Any,
        args: Any = None,
        *,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        processing_class: Any = None,
        cluster: str | os.PathLike[str] = "here",
        sequence_length: int | None = None,
        **others: Any,
    ) -> None:
        transformers = library("transformers", "tutti.transformers", "huggingface")
        self.args = args or transformers.TrainingArguments("trainer_output")
        for name, why in _OWN.items():
            if others.pop(name, None) is not None:
                raise InputError(f"Trainer: '{name}' would change the result, and {why}")
        unheard = [n for n in ("callbacks", "compute_metrics") if others.pop(n, None) is not None]
        self.ignored = (*ignored_fields(self.args), *unheard)
        if self.ignored:
            sys.stderr.write(f"tutti: ignored: {', '.join(self.ignored)}\n")
        if train_dataset is None:
            raise InputError(
                "Trainer: 'train_dataset' is missing; give rows, or a datasets.Dataset"
            )
        self._rows, self._held = list(train_dataset), list(eval_dataset or ())
        self._folder = self._model_folder(model, processing_class)
        config = self._config(cluster, sequence_length, others)
        self._job = Job(self._with_steps(config))
        self.result: TrainResult | None = None

    def _model_folder(self, model: Any, tokenizer: Any) -> str:
        """Return a folder with the model; one that lives in memory is written first."""
        if isinstance(model, (str, os.PathLike)):
            return os.fspath(model)
        folder = Path(f"{self.args.output_dir}-model")
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        return str(folder)

    def _config(
        self, cluster: str | os.PathLike[str], length: int | None, others: Mapping[str, Any]
    ) -> TrainConfig:
        output = Path(self.args.output_dir)
        sources = [str(rows_file(rows, output)) for rows in (self._rows, self._held) if rows]
        data: dict[str, Any] = {"train": sources[:1], "seed": self.args.seed}
        data["tokenizer"] = tokenizer_of(self._rows, "")
        if self._held:
            data["validation"] = sources[1:]
        plain: dict[str, Any] = {"model": self._folder, "cluster": os.fspath(cluster), "data": data}
        chips = cluster_of(build(TrainConfig, plain, Place("Trainer"))).num_chips
        keys = plain | training_keys(self.args, chips=chips)
        for name, value in others.items():
            both = isinstance(value, Mapping) and isinstance(keys.get(name), dict)
            keys[name] = {**keys[name], **value} if both else value
        lengths = [len(row["input_ids"]) for row in self._rows if "input_ids" in row]
        if length is None and lengths:
            length = max(lengths)
        if length is not None:
            keys["job"] = {"sequence_length": length, **keys["job"]}
        return build(TrainConfig, keys, Place("Trainer"))

    def _with_steps(self, config: TrainConfig) -> TrainConfig:
        """Return the job with its steps: as given, or so many that all rows are seen."""
        from tutti.models.load import load_model

        steps = self.args.max_steps
        if steps <= 0:
            spec, length = load_model(config.model), config.job.sequence_length
            data = open_data(
                config.data,
                sequence_length=length or min(4096, spec.max_length),
                vocabulary=spec.vocab,
                model_folder=Path(config.model),
                objective=config.objective,
            )
            rows = sum(part.count for part in data.train.parts)
            batch = config.job.global_batch
            assert batch is not None, "the arguments give one"
            steps = max(1, math.ceil(rows / batch * self.args.num_train_epochs))
            config = with_changes(
                config, {"job.sequence_length": length or min(4096, spec.max_length)}
            )
        warm = warmup_steps(self.args, steps)
        return with_changes(config, {"steps": steps, "optimizer.warmup_steps": warm})

    @property
    def config(self) -> TrainConfig:
        """The training file that the arguments come to."""
        return self._job.config

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train; `resume_from_checkpoint` goes on from the newest one in the output folder."""
        found = self._job.fit(resume=bool(resume_from_checkpoint))
        self.result = found
        mean = sum(found.losses) / max(1, len(found.losses))
        metrics = {
            "train_loss": mean,
            "train_steps_per_second": 1.0 / found.seconds_per_step,
            "mfu": found.mfu,
        }
        return TrainOutput(found.steps, mean, metrics)

    @property
    def model(self) -> Any:
        """The trained model, as transformers has it."""
        return self._trained().model()

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Write the trained model (or its adapters) into a folder."""
        found = self._trained()
        source = found.huggingface or found.adapter
        if source is None:
            raise InputError("the run wrote no folder for transformers")
        target = Path(output_dir or Path(self.args.output_dir) / "final")
        shutil.copytree(source, target, dirs_exist_ok=True)

    def _trained(self) -> TrainResult:
        if self.result is None:
            raise InputError("Trainer: nothing is trained yet; call train() first")
        return self.result


__all__ = ["TrainOutput", "Trainer"]
