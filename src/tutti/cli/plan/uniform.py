"""`tutti plan --uniform`: one Megatron-style strategy over all chips, without a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tutti.cli.shared.output import print_json, print_rich, say_doubtful_length
from tutti.errors import InputError

if TYPE_CHECKING:
    from tutti.cli.plan.results import Results
    from tutti.hardware.cluster import Cluster


def lay_uniform(
    model: str,
    cluster: str | Cluster,
    uniform: str,
    job: Mapping[str, object],
    schedules: Sequence[str],
    results: Results,
) -> None:
    """Lay the degrees over the cluster, prove the schedule, show and write the plan."""
    from tutti.cost.plan.record_programs import record_collectives
    from tutti.document import Place, build
    from tutti.hardware.cluster import Cluster
    from tutti.models.load import load_model
    from tutti.plan.drawing import draw_plan
    from tutti.plan.files import plan_to_document
    from tutti.plan.job import Job
    from tutti.plan.uniform import Degrees, default_batch, uniform_plan
    from tutti.schedule.check import require_valid
    from tutti.schedule.schedule import build_schedule

    if len(schedules) > 1:
        raise InputError(f"--schedule: a uniform plan has one, not {' and '.join(schedules)}")
    degrees = Degrees.parse(uniform)
    spec, machines = load_model(model), Cluster.load(cluster)
    defaults = {
        "sequence_length": min(4096, spec.max_length),
        "global_batch": default_batch(machines, degrees),
        "precision": "bf16",
    }
    given = {name: value for name, value in job.items() if value is not None}
    values = {**defaults, **given, "schedule": schedules[0] if schedules else "1f1b"}
    job_asked = build(Job, values, Place("plan"))
    say_doubtful_length(spec, job_asked.sequence_length)
    made = uniform_plan(spec, machines, job_asked, degrees)
    require_valid(build_schedule(made))
    made = record_collectives(made, spec, machines)
    results.write_plan(made)
    if results.json:
        print_json({"plan": plan_to_document(made)})
    elif results.prints_export:
        results.write_export(made, spec, machines)
        return
    else:
        print_rich(draw_plan(made))
    results.write_export(made, spec, machines)
    results.say_written()
