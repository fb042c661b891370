"""What a training run came to, as its starter reads it from the ranks. Needs no torch."""

from __future__ import annotations

import dataclasses
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.errors import InputError, StoppedError
from tutti.optional_imports import library
from tutti.train.run.planning import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run came to."""

    steps: int
    losses: tuple[float, ...]
    validation: tuple[tuple[int, float], ...]  # (step, loss)
    seconds_per_step: float  # median, without the first
    tokens_per_s: float
    mfu: float
    predicted_s: float | None
    checkpoint: Path | None
    huggingface: Path | None
    output: Path
    adapter: Path | None = None  # the folder for peft, where adapters were trained
    best: Path | None = None  # the checkpoint with the lowest validation loss
    finished: bool = True  # all steps were made
    stopped_by: str = ""  # the signal that ended it before: SIGINT (Ctrl-C) or SIGTERM

    def to_document(self) -> dict[str, object]:
        """Return plain values."""
        written = dataclasses.asdict(self)
        return {k: str(v) if isinstance(v, Path) else v for k, v in written.items()}

    def model(self) -> Any:
        """Return the trained model as transformers has it, with adapters where such were trained.

        Those are put onto the model that the run began with.
        """
        transformers = library("transformers", "a model as transformers has it", "huggingface")
        load = transformers.AutoModelForCausalLM.from_pretrained
        if self.huggingface is not None:
            return load(self.huggingface)
        if self.adapter is None:
            raise InputError(
                "the run wrote no folder for transformers; leave checkpoints.huggingface on"
            )
        peft = library("peft", "a model with adapters", "huggingface")
        return peft.AutoPeftModelForCausalLM.from_pretrained(self.adapter)

    def require_finished(self) -> None:
        """Raise where somebody ended the run before its last step."""
        if self.finished:
            return
        by = signal.Signals[self.stopped_by]
        how = "Ctrl-C" if by is signal.SIGINT else by.name
        saved = "saved; go on with --resume" if self.checkpoint is not None else "nothing is saved"
        raise StoppedError(f"stopped by {how} after step {self.steps}; {saved}", by=by)


def result_of(summary: dict[str, Any], job: Job, *, asked_by: int = 0) -> TrainResult:
    """Return a rank's summary as a result; `asked_by` is the signal that the starter got, if any.

    Ranks of this machine are asked by SIGTERM, whatever their starter was asked by.
    """
    folder = job.config.folder
    if summary.get("steps") is None:
        raise InputError("the run has no steps")
    path, best = summary.get("checkpoint"), summary.get("best")
    exported = summary.get("huggingface")
    finished = bool(summary.get("early")) or summary["steps"] >= job.config.steps
    by = signal.Signals(asked_by or summary.get("stopped_by") or signal.SIGTERM).name
    return TrainResult(
        steps=summary["steps"],
        losses=tuple(summary["losses"]),
        validation=tuple((int(s), float(v)) for s, v in summary["validation"]),
        seconds_per_step=summary["seconds_per_step"],
        tokens_per_s=summary["tokens_per_s"],
        mfu=summary["mfu"],
        predicted_s=summary["predicted_s"],
        checkpoint=None if path is None else Path(path),
        huggingface=None if exported is None else Path(exported),
        output=folder,
        adapter=Path(summary["adapter"]) if summary.get("adapter") else None,
        best=None if best is None else Path(best),
        finished=finished,
        stopped_by="" if finished else by,
    )
