"""`tutti bench plan --opt`: OPT-350M on measured layers, scored by the formula that others use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.bench.plan_instances import OPT_PEERS, OPT_SIZES

if TYPE_CHECKING:
    from rich.table import Table

    from tutti.cost.measured.layer_profiles import LayerProfiles
    from tutti.hardware.cluster import Cluster
    from tutti.models.spec import ModelSpec
    from tutti.plan.plan import Plan
    from tutti.search.question.space import Problem

Row = dict[str, Any]
MODEL, LENGTH, BATCH = "opt-350m", 2048, 1024
_METIS_CUT = 7  # units on V100, the other 19 on A100


def run_opt(size: int, folder: Path) -> Row:
    """Plan OPT-350M on `size` A100 and as many V100 for the formula, beside Metis' plan."""
    from tutti.cost.measured.layer_profiles import LayerProfiles
    from tutti.search.exact.comparison_formula import score
    from tutti.search.exact.comparison_search import search_by_formula
    from tutti.search.pricing.simulate_draft import DraftSimulator
    from tutti.search.pricing.unit_tables import Tables
    from tutti.search.strategy.summary import summary_of

    profiles = LayerProfiles.load(folder)
    search_by_formula(opt_problem(OPT_SIZES[0], profiles), profiles)  # compiles what it needs
    problem = opt_problem(size, profiles)
    metis = score(metis_plan(problem.model, problem.cluster), profiles)
    started = time.process_time()
    answer = search_by_formula(problem, profiles)
    simulator = DraftSimulator(Tables(problem))
    proven = simulator.prove(answer.plan, simulator.price(answer.plan), summary_of(answer.plan))
    return {
        "instance": f"OPT-{size}",
        "chips": problem.cluster.num_chips,
        "metis_ms": metis.step_ms,
        "metis_cpu_s": OPT_PEERS[size][0],
        "sailor_cpu_s": OPT_PEERS[size][1],
        "tutti_cpu_s": time.process_time() - started,
        "tutti_ms": answer.score.step_ms,
        "bound_ms": answer.bound_ms,
        "chips_step": answer.chips_step,
        "fits": answer.score.fits,
        "gain_pct": 100 * (metis.step_ms / answer.score.step_ms - 1),
        "step_time_s": proven.step_seconds,
        "micro_batch": answer.plan.pipelines[0].micro_batch,
        "stages": stage_texts(answer.plan),
    }


def opt_problem(size: int, profiles: LayerProfiles) -> Problem:
    """Return the question, in the space that the formula has terms for."""
    from tutti.cost.plan.sources import Sources
    from tutti.hardware.cluster import Cluster
    from tutti.models.load import load_model
    from tutti.plan.job import Job, ScheduleKind
    from tutti.search.question.space import Problem, Space

    measured = sorted({batch for _, _, batch in profiles.figures})
    return Problem(
        model=load_model(MODEL),
        cluster=Cluster.load(f"OPT-{size}"),
        job=Job(sequence_length=LENGTH, global_batch=BATCH),
        sources=Sources(layer_profiles=profiles),
        space=Space(
            cp=(1,),
            sequences=tuple(measured),
            schedules=(ScheduleKind.ONE_F_ONE_B,),
            virtual=(1,),
            shard=(0,),
            recompute=("none",),
            offload=(),
            max_pipelines=1,
        ),
    )


def metis_plan(model: ModelSpec, cluster: Cluster) -> Plan:
    """Return Metis' plan as the table describes it: V100 first, tp 1, 2 sequences each."""
    from tutti.plan.chips import ChipSet
    from tutti.plan.files import refer_to_cluster, refer_to_model
    from tutti.plan.job import Job
    from tutti.plan.plan import Pipeline, Plan, Replica, Stage

    cuts = (("v100", (0, _METIS_CUT)), ("a100", (_METIS_CUT, model.num_units)))
    size = cluster.pool("v100").num_chips
    stages = []
    for name, units in cuts:
        pool = cluster.pool(name)
        chips = ChipSet.of(f"{name}/0-{pool.nodes - 1}/0-{pool.node.num_chips - 1}")
        replica = Replica(chips=chips, count=pool.num_chips, sequences=2)
        stages.append(Stage(units=(units,), replicas=(replica,)))
    pipeline = Pipeline(
        micro_batch=2 * size, micro_batches=BATCH // (2 * size), stages=tuple(stages)
    )
    return Plan(
        model=refer_to_model(model),
        cluster=refer_to_cluster(cluster),
        job=Job(sequence_length=LENGTH, global_batch=BATCH),
        pipelines=(pipeline,),
    )


def stage_texts(plan: Plan) -> list[str]:
    """Say per stage what others need to score it: units, then (chip, tp) replicas with shares."""
    texts = []
    for p, _, stage in plan.stages():
        units = " ".join(f"{start}-{stop - 1}" for start, stop in stage.units)
        replicas = " + ".join(
            f"{r.count} × ({r.chips.pools[0]}, tp {r.tp}, {r.sequences} sequences)"
            for r in stage.replicas
        )
        where = f"pipeline {p}, " if len(plan.pipelines) > 1 else ""
        texts.append(f"{where}units {units}: {replicas}")
    return texts


def opt_table(rows: Sequence[Row]) -> Table:
    """Return the comparison, one row per size."""
    from rich import box
    from rich.table import Table

    title = "opt-350m on A100 + V100 by measured layers: step by the comparison formula"
    table = Table(box=box.SIMPLE, title=title)
    for name in ("cluster", "Metis, ms", "tutti, ms", "gain", "bound, ms", "Metis, CPU s",
                 "Sailor, CPU s", "tutti, CPU s", "micro-batch"):  # fmt: skip
        table.add_column(name, justify="left" if name == "cluster" else "right")
    for row in rows:
        if "metis_ms" not in row:
            table.add_row(row["instance"], *"–" * 8)
            continue
        table.add_row(
            row["instance"],
            f"{row['metis_ms']:,.1f}",
            f"{row['tutti_ms']:,.1f}",
            f"{row['gain_pct']:+.2f} %",
            f"{row['bound_ms']:,.1f}",
            f"{row['metis_cpu_s']:g}",
            f"{row['sailor_cpu_s']:g}",
            f"{row['tutti_cpu_s']:.2f}",
            f"{row['micro_batch']}",
        )
    return table
