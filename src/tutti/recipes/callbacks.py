"""transformers' callbacks, told of a run of tutti's, and the log that its state holds.

A callback hears of steps, logs and evaluations, and may ask the run to end. It gets no model, for
that lies in the ranks' processes, and cannot ask for a save or an evaluation in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tutti.optional_imports import library
from tutti.ranks.local_processes import RankEvent
from tutti.recipes.training_arguments import Lengths, log_every


class TrainerCallbacks:
    """The callbacks of one trainer, with their state."""

    def __init__(self, args: Any, callbacks: Sequence[Any] | None) -> None:
        transformers = library("transformers", "callbacks", "huggingface")
        self._args = args
        self._each = [one() if isinstance(one, type) else one for one in callbacks or ()]
        self.state = transformers.TrainerState()
        self.control = transformers.TrainerControl()
        self._lengths = Lengths(0, 1)
        self._every = 0
        self.losses: list[float] = []  # of all steps
        self._logged = 0  # of them

    def add(self, callback: Any) -> None:
        """Let one more hear."""
        self._each.append(callback() if isinstance(callback, type) else callback)

    def begin(self, lengths: Lengths) -> None:
        """Tell that training begins."""
        self._lengths, self._every = lengths, log_every(self._args, lengths)
        self.control.should_training_stop = False  # a run before may have been ended
        self.state.max_steps = lengths.steps
        self.state.num_train_epochs = -(-lengths.steps // lengths.epoch)
        self.state.logging_steps = self._every
        self._tell("on_train_begin")

    def hear(self, event: RankEvent) -> bool:
        """Take what a rank said; tell whether a callback asks the run to end."""
        if event.kind == "step":
            self._step(event)
        elif event.kind == "validation":
            metrics = {"eval_loss": event.values["loss"], "epoch": self.state.epoch}
            self.state.log_history.append({**metrics, "step": self.state.global_step})
            self._tell("on_evaluate", metrics=metrics)
            best = self.state.best_metric
            if best is None or metrics["eval_loss"] < best:
                self.state.best_metric = metrics["eval_loss"]
                self.state.best_global_step = self.state.global_step
        return bool(self.control.should_training_stop)

    def end(self) -> None:
        """Tell that training is over."""
        self._tell("on_train_end")

    def _step(self, event: RankEvent) -> None:
        values, state = event.values, self.state
        self._tell("on_step_begin")
        state.global_step = int(values["step"])
        state.epoch = state.global_step / self._lengths.epoch
        self.losses.append(float(values["loss"]))
        self._tell("on_step_end")
        first = self._args.logging_first_step and state.global_step == 1
        if first or (self._every and state.global_step % self._every == 0):
            fresh = self.losses[self._logged :]
            self._logged = len(self.losses)
            logs = {
                "loss": sum(fresh) / len(fresh),
                "grad_norm": values["gradient_norm"],
                "learning_rate": values["learning_rate"],
                "epoch": state.epoch,
            }
            state.log_history.append({**logs, "step": state.global_step})
            self._tell("on_log", logs=logs)
        if state.global_step % self._lengths.epoch == 0:
            self._tell("on_epoch_end")

    def _tell(self, name: str, **words: Any) -> None:
        for callback in self._each:
            control = getattr(callback, name)(self._args, self.state, self.control, **words)
            self.control = self.control if control is None else control
