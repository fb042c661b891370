"""The options of `tutti plan`, each with its help; `search.question` gives them their meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="A Hugging Face folder, a config.json, or a name.")]
ClusterName = Annotated[str, typer.Argument(help="A cluster file, or the name of an example.")]

# --- the job -----------------------------------------------------------------------------------

GlobalBatch = Annotated[
    int | None,
    typer.Option(
        help="Sequences per step (default: 8 per chip, rounded up to a power of two; with "
        "--uniform 8 micro-batches per stage)."
    ),
]
SequenceLength = Annotated[
    int | None, typer.Option(help="Tokens per sequence (default: 4096 or the model's limit).")
]
Precision = Annotated[
    str | None,
    typer.Option(help="bf16 (default), fp16, fp32, pure_bf16, fp8 or pure_fp8.", metavar="POLICY"),
]
Objective = Annotated[
    str,
    typer.Option(
        help="What to make best: time (of a step), cost (tokens per currency unit) or energy "
        "(tokens per joule); with --serve: rate (within limits), cost or chips.",
        metavar="GOAL",
    ),
]
Uniform = Annotated[
    str | None,
    typer.Option(
        help="No search, but Megatron-style degrees: tp=8,pp=4 and any of cp, ep, dp, vpp, mbs, "
        "sp, shard, recompute.",
        metavar="DEGREES",
    ),
]

# --- serving -----------------------------------------------------------------------------------

Serve = Annotated[
    Path | None,
    typer.Option(
        help="Plan a deployment that serves this workload: a description (YAML) or a trace (CSV, "
        "JSON lines).",
        metavar="WORKLOAD",
    ),
]
Rate = Annotated[
    float | None, typer.Option(help="With --serve: requests per second instead of the workload's.")
]
FirstToken = Annotated[
    float | None, typer.Option(help="With --serve: seconds to the first token, at most.")
]
PerToken = Annotated[
    float | None, typer.Option(help="With --serve: seconds per later token, at most.")
]
Weights = Annotated[
    str | None,
    typer.Option(help="With --serve: fp8 or int8 weights, on chips that have it.", metavar="DTYPE"),
]
NoSeparation = Annotated[
    bool, typer.Option("--no-separation", help="With --serve: every engine does both roles.")
]

# --- what the search may choose from -----------------------------------------------------------

TpMax = Annotated[int | None, typer.Option(help="Chips that may split a matrix, at most.")]
CpMax = Annotated[int | None, typer.Option(help="Chips that may split a sequence, at most.")]
MaxStages = Annotated[int | None, typer.Option(help="Stages of a pipeline, at most.")]
MicroBatch = Annotated[
    str | None,
    typer.Option(
        help="Sequences per replica and micro-batch to choose from: 1,2,4.", metavar="N,…"
    ),
]
Schedule = Annotated[
    list[str] | None,
    typer.Option(
        help="Schedules to choose from, such as 1f1b,zero_bubble. A list, or repeated; one "
        "with --uniform.",
        metavar="KIND,…",
    ),
]
Shard = Annotated[
    str | None,
    typer.Option(help="Shard levels to choose from: 0,1 of 0 to 3.", metavar="LEVEL,…"),
]
On = Annotated[
    list[str] | None,
    typer.Option(
        help="Plan onto these nodes of the cluster only, such as 'a800/0-3,7': what is free, or "
        "what a scheduler gave. May be repeated.",
        metavar="NODES",
    ),
]
PoolOnly = Annotated[
    list[str] | None,
    typer.Option(help="Use this pool only. May be repeated.", metavar="POOL"),
]
NoOffload = Annotated[bool, typer.Option("--no-offload", help="Keep all state on the chips.")]
NoRecompute = Annotated[bool, typer.Option("--no-recompute", help="Keep all activations.")]
NoMixedStages = Annotated[
    bool, typer.Option("--no-mixed-stages", help="One kind of chip per stage.")
]
NoMixedPipelines = Annotated[
    bool, typer.Option("--no-mixed-pipelines", help="One kind of chip per pipeline.")
]
UseAllPools = Annotated[
    bool, typer.Option("--use-all-pools", help="Leave no pool out, even if it slows the rest.")
]

Exportable = Annotated[
    str | None,
    typer.Option(
        help="Search only what megatron or flagscale can run, so that --export works.",
        metavar="SYSTEM",
    ),
]

# --- other questions and results ---------------------------------------------------------------

WhatIf = Annotated[
    list[str] | None,
    typer.Option(
        help='Also plan for a changed cluster: "+8xH100", "-node 3", "slow a800 0.8", '
        '"link a800 p800 0.5"; several changes with commas. May be repeated.',
        metavar="CHANGE",
    ),
]
ReplanFrom = Annotated[
    Path | None,
    typer.Option(
        help="A running plan: what to run now that the cluster changed (to CLUSTER, or by one "
        "--what-if), what must move, and when that pays back.",
        metavar="PLAN",
    ),
]
Export = Annotated[
    str | None,
    typer.Option(help="Print the plan as megatron arguments or flagscale YAML.", metavar="FORMAT"),
]
ExportTo = Annotated[
    Path | None, typer.Option(help="Write the export to a file instead.", metavar="FILE")
]
Html = Annotated[
    Path | None, typer.Option(help="Write a self-contained page about the plan.", metavar="FILE")
]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan.")]
