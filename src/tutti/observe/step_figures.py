"""Every figure of steps and pools that Prometheus fetches: its name by Prometheus' rules, and more.

docs/reference/metrics.md shows these tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class StepFigure:
    """A field of a step's record, as Prometheus calls it."""

    field: str
    name: str
    means: str
    label: str = ""

    @property
    def kind(self) -> Literal["gauge", "counter"]:
        """Whether it only grows."""
        return "counter" if self.name.endswith("_total") else "gauge"


STEP_FIGURES = (
    StepFigure("step", "tutti_step", "the last step"),
    StepFigure("loss", "tutti_loss", "loss of the last step"),
    StepFigure("validation_loss", "tutti_validation_loss", "last loss on held-out data"),
    StepFigure("balance", "tutti_balance_loss", "load-balancing loss of experts"),
    StepFigure("margin", "tutti_answer_margin", "how far chosen answers are ahead of rejected"),
    StepFigure("right", "tutti_answers_right_ratio", "share of examples in which they are"),
    StepFigure("gradient_norm", "tutti_gradient_norm", "norm of the gradient before clipping"),
    StepFigure("learning_rate", "tutti_learning_rate", "learning rate of the last step"),
    StepFigure("tokens", "tutti_tokens_total", "tokens with a target since the process began"),
    StepFigure("skipped", "tutti_steps_skipped_total", "steps that were skipped"),
    StepFigure("seconds", "tutti_step_duration_seconds", "duration of the last step"),
    StepFigure("predicted_s", "tutti_step_predicted_seconds", "its forecast"),
    StepFigure("tokens_per_s", "tutti_throughput_tokens_per_second", "tokens per second"),
    StepFigure("mfu", "tutti_mfu_ratio", "model FLOPs utilisation"),
    StepFigure("hfu", "tutti_hfu_ratio", "hardware FLOPs utilisation"),
)
_POOL = {
    "ranks": ("tutti_pool_ranks", "ranks of a pool"),
    "compute_s": ("tutti_pool_compute_seconds", "of a mean rank's step: passes, optimizer"),
    "communication_s": ("tutti_pool_communication_seconds", "waiting for the network itself"),
    "bubble_s": ("tutti_pool_bubble_seconds", "waiting for other ranks"),
    "copy_s": ("tutti_pool_copy_seconds", "waiting for copies between host and chip"),
    "data_s": ("tutti_pool_data_seconds", "waiting for data"),
    "other_s": ("tutti_pool_other_seconds", "the engine's own work"),
    "peak_bytes": ("tutti_pool_memory_peak_bytes", "most memory of a rank that was in use"),
    "overrun": ("tutti_pool_overrun_ratio", "how far a host fell behind emulated chips"),
}
POOL_FIGURES = tuple(StepFigure(field, *words, "pool") for field, words in _POOL.items())

# What rules alone look at: made of the figures above, and of the run's folder while it lives.
JUDGED_FIGURES = {
    "tutti_step_over_forecast_ratio": "duration of a step ÷ its forecast",
    "tutti_step_over_usual_ratio": "duration of a step ÷ the median of the 50 before it",
    "tutti_loss_undefined": "1 where a loss is no number or endless, else 0",
    "tutti_loss_over_usual_ratio": "loss of a step ÷ the median of the 50 before it (0.1 at least)",
    "tutti_data_wait_ratio": "share of a step in which the pool that waited most had no samples",
    "tutti_step_age_ratio": "time since the last step ÷ the median of the 50 before",
    "tutti_checkpoint_age_ratio": "time since the last checkpoint ÷ the time between the two last",
}
