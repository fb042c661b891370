"""`tutti train`: run a training job here, or be one of its ranks under a launcher."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from tutti.cli.shared.output import Json, print_json, print_rich, say_doubtful_length
from tutti.cli.shared.torch_needed import require_torch
from tutti.errors import InputError

if TYPE_CHECKING:
    from tutti.train.run.config import TrainConfig
    from tutti.train.run.planning import Job
    from tutti.train.run.result import TrainResult

NEWEST = "newest"  # what --resume alone means
IF_ANY = "if-any"  # for launchers, which cannot know
LARGEST_ERROR = 0.2  # of a predicted step, above which the summary says what helps


Config = Annotated[
    Path | None, typer.Argument(help="A training file (docs/how-to/train.md), or a model folder.")
]
Ranks = Annotated[
    int | None,
    typer.Option(min=1, help="Processes of this machine, which share it (--cluster here)."),
]


Plan = Annotated[Path | None, typer.Option("--plan", help="A plan file, instead of a search.")]
Model = Annotated[str | None, typer.Option("--model", help="A Hugging Face folder or a name.")]
Cluster = Annotated[
    str | None, typer.Option("--cluster", help="A cluster file, a name, or 'here'.")
]
Data = Annotated[
    list[str] | None, typer.Option("--data", help="Files to train on. May be repeated.")
]
Output = Annotated[
    str | None, typer.Option("--output", "-o", help="The folder for everything it writes.")
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        help="Go on from the newest whole checkpoint in the folder, or from that of a step; "
        "--resume=if-any begins where there is none.",
        metavar="[STEP]",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Begin anew over an earlier run in the folder.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change a key of the file: optimizer.learning_rate=1e-4. May be repeated.",
        metavar="KEY=VALUE",
    ),
]
Trace = Annotated[
    list[int] | None,
    typer.Option(
        "--trace", help="Write a Chrome trace of this step. May be repeated.", metavar="STEP"
    ),
]
Port = Annotated[
    int | None, typer.Option("--port", help="Where the ranks meet (default: a free port).")
]


def train(
    config: Config = None,
    plan: Plan = None,
    model: Model = None,
    cluster: Cluster = None,
    ranks: Ranks = None,
    data: Data = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Optimizer steps in all.")] = None,
    output: Output = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
    changes: Changes = None,
    trace: Trace = None,
    port: Port = None,
    json: Json = False,
) -> None:
    """Train a model as planned, on this machine's chips or as a rank under torchrun.

    Ctrl-C (or SIGTERM) finishes the step, saves and ends with 130 (143); --resume goes on.
    """
    require_torch("train")
    from tutti.ranks.launcher_variables import started_as_rank
    from tutti.train.run.starting import check_inputs, has_checkpoints, was_cut_off

    going_on = _resume(resume)
    wanted = asked(config, plan=plan, model=model, cluster=cluster, ranks=ranks, data=data,
                   steps=steps, output=output, changes=changes or [], trace=trace)  # fmt: skip
    if started_as_rank(os.environ):
        from tutti.train.run.rank import run_rank, start_together

        start = start_together(wanted, resume=going_on, overwrite=overwrite)
        run_rank(start.job, resume=start.resume).require_finished()
        return
    if resume == IF_ANY:
        going_on = has_checkpoints(wanted) or was_cut_off(wanted, True)
        overwrite = not going_on
    check_inputs(wanted, going_on, overwrite=overwrite)
    job = _prepared(wanted, quiet=json)
    say_doubtful_length(job.spec, job.plan.job.sequence_length)
    result = _run(job, resume=going_on, overwrite=overwrite, port=port, quiet=json)
    if json:
        print_json(result.to_document())
    else:
        print_rich(*_summary(result), *doubts(result, job))
    result.require_finished()


class TrainCommand(TyperCommand):
    """Lets --resume stand alone, or before a step."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a --resume without a step a value of its own."""
        words = list(args)
        for at, word in enumerate(words):
            if word == "--":
                break
            if word == "--resume" and not "".join(words[at + 1 : at + 2]).isdecimal():
                words[at] = f"--resume={NEWEST}"
        return super().parse_args(ctx, words)


def _resume(text: str | None) -> bool | int:
    if text is None or text == IF_ANY:
        return False
    if text == NEWEST:
        return True
    if not text.isdecimal():
        raise InputError(f"--resume {text}: write the step of a checkpoint, or --resume alone")
    return int(text)


def asked(
    config: Path | None,
    *,
    plan: Path | None,
    model: str | None,
    cluster: str | None = None,
    ranks: int | None = None,
    data: list[str] | None,
    steps: int | None,
    output: str | None,
    changes: list[str],
    trace: list[int] | None = None,
) -> TrainConfig:
    """Return the job of a training file and options, which come before what the file says."""
    from tutti.document import Place, build
    from tutti.train.run.config import TrainConfig, with_changes

    if config is not None and _is_model(config):
        if model is not None:
            raise InputError(f"'{config}' and --model {model} are two models; give one")
        config, model = None, str(config)
    if ranks is not None and plan is not None:
        raise InputError("--ranks: the plan says how many; leave --ranks or --plan out")
    given: dict[str, object] = {
        "plan": None if plan is None else str(plan),
        "model": model,
        "cluster": cluster if cluster is not None or ranks is None else "here",
        "ranks": ranks,
        "steps": steps,
        "output": output,
        "data.train": None if data is None else list(data),
        "measure.trace_steps": list(trace) if trace else None,
    }
    if config is not None:
        asked_for = TrainConfig.load(config)
    else:
        if model is None and plan is None:
            raise InputError("name a training file, or --model (and --data), or --plan")
        if model is None and plan is not None:
            given["model"] = _planned_model(plan)
        source = list(data) if data else [{"kind": "synthetic"}]
        asked_for = build(
            TrainConfig, {"model": given["model"], "data": {"train": source}}, Place("options")
        )
    return with_changes(asked_for, {k: v for k, v in given.items() if v is not None}, changes)


def _is_model(path: Path) -> bool:
    """Tell a model from a training file: a folder, its config.json, or what a hub would call it."""
    from tutti.models.load import catalog_names, is_hub_id

    if path.is_dir() or path.name == "config.json" or str(path) in catalog_names():
        return True
    return is_hub_id(str(path))


def _planned_model(plan: Path) -> str:
    from tutti.models.load import catalog_names
    from tutti.plan.files import load_plan

    name = load_plan(plan).model.name
    if name not in catalog_names() and not Path(name).exists():
        raise InputError(
            f"{plan}: its model '{name}' is not found by that name; give --model FOLDER"
        )
    return name


def _prepared(config: TrainConfig, *, quiet: bool) -> Job:
    from tutti.cli.shared.progress import ProgressLine
    from tutti.train.run.planning import prepare

    with ProgressLine("planning", wanted=not quiet) as line:
        return prepare(config, line)


def _run(
    job: Job, *, resume: bool | int, overwrite: bool, port: int | None, quiet: bool
) -> TrainResult:
    from tutti.cli.train_live import LiveRun
    from tutti.train.run.trainer import run_local

    with LiveRun(job, wanted=not quiet) as live:
        return run_local(job, resume=resume, overwrite=overwrite, listener=live.hear, port=port)


def doubts(result: TrainResult, job: Job) -> list[str]:
    """Return why the run's times, or their prediction, say little, and what helps."""
    from tutti.observe.history import read_run

    if result.predicted_s is None or not result.losses:
        return []
    try:
        run = read_run(result.output)
    except InputError:  # a note is no reason for a run to fail that is done
        return []
    if run.emulated and not run.counts:
        return [
            f"the host fell behind the emulated chips by {run.overrun:.0%}: these times do not "
            "count; run fewer things beside it, or emulate slower chips"
        ]
    error = abs(result.predicted_s / result.seconds_per_step - 1.0)
    if error <= LARGEST_ERROR or job.config.job.chip_profiles:
        return []
    asked = job.plan.job
    core = " --device cpu --threads 1" if run.emulated else ""  # a chip is a part of a core
    return [
        "predicted without a profile of this machine; this measures it, and predicts by it:",
        f"  tutti profile {job.config.model} --dtype {asked.precision.stream.value}{core} "
        f"--sequence-length {asked.sequence_length} --tokens {_micro_batches(job)} -o here.json",
        "  tutti train … --set job.chip_profiles=\\[here.json]",
    ]


def _micro_batches(job: Job) -> str:
    """Return the tokens of the plan's micro-batches, as `tutti profile` takes them."""
    plan = job.plan
    sequences = {replica.sequences for _, _, stage in plan.stages() for replica in stage.replicas}
    return ",".join(str(n * plan.job.sequence_length) for n in sorted(sequences))


def _summary(result: TrainResult) -> list[str]:
    from tutti.units import count_text, many, seconds_text

    first, last = result.losses[:1], result.losses[-1:]
    lines = [
        f"[bold]{many(result.steps, 'step')}[/], loss {first[0]:.4f} → {last[0]:.4f}, "
        f"{count_text(result.tokens_per_s)} tokens/s, MFU {result.mfu:.1%}"
        if first
        else "nothing was left to do"
    ]
    if result.predicted_s is not None and result.losses:
        error = result.predicted_s / result.seconds_per_step - 1.0
        lines.append(
            f"step {seconds_text(result.seconds_per_step)}, "
            f"predicted {seconds_text(result.predicted_s)} ({error:+.1%})"
        )
    if result.checkpoint is not None:
        lines.append(f"checkpoint: {result.checkpoint}")
    if result.best is not None and result.best != result.checkpoint:
        lines.append(f"lowest validation loss: {result.best}")
    if result.adapter is not None:
        lines.append(f"adapter for peft: {result.adapter}")
    if result.huggingface is not None:
        lines.append(f"Hugging Face folder: {result.huggingface}")
    lines.append(f"figures: {result.output / 'metrics.jsonl'}")
    return lines
