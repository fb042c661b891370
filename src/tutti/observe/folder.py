"""What lies where in the output folder of a run."""

from __future__ import annotations

METRICS = "metrics.jsonl"  # a line per step
SAMPLES = "samples.jsonl"  # of answers that the model gave itself: a group of every batch
EVALUATIONS = "evaluations.jsonl"  # a line of figures each time that tasks were taken
SOON = ".metrics-soon.jsonl"  # steps whose lines are not complete yet
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
ADAPTER = "adapter"  # what was trained of it, as peft loads it
AVERAGED = "averaged"  # the same with the mean of the weights of many steps
EXPORT = "huggingface"  # the trained model, as transformers loads it
EVENTS = "events.jsonl"  # a line for each alert that began or ended
RUN_FILE = "run.json"  # the job as it was asked for
PLAN_FILE = "plan.json"
SERIES = "series"  # figures of every host by the second
RINGS = "rings"  # of every rank its last events
ELASTIC = "elastic"  # what the leader of an elastic run keeps
JOURNAL = "journal.jsonl"  # in it: a line per decision


def trace_name(step: int | str) -> str:
    """Return the file of a step's trace; of "*", the pattern of all."""
    return f"trace-step-{step}.json"
