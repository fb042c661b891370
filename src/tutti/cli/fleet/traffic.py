"""What jobs of a fleet send, by options of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tutti.errors import InputError, hint

if TYPE_CHECKING:
    from tutti.fleet.chips import Grounds
    from tutti.fleet.network import SharedNetwork
    from tutti.fleet.request import JobRequest, Shape
    from tutti.simulate.step_traffic import StepTraffic

_PATTERNS = ("none", "ring", "all_to_all")

Traffic = Annotated[str, typer.Option(help="What jobs send: none, ring or all_to_all.")]
PlansOfJobs = Annotated[
    list[str] | None,
    typer.Option(help="Jobs that are a plan: NAME=PLAN, a pattern such as 'gpt*=gpt.json'."),
]
Share = Annotated[float, typer.Option(help="Of a step in which they send.")]


def habits_of(texts: list[str], jobs: list[str]) -> dict[str, StepTraffic]:
    """Return what jobs send that are plans."""
    from fnmatch import fnmatchcase

    from tutti.cli.predict import load_estimate
    from tutti.cost.plan.sources import Sources
    from tutti.simulate.step_traffic import step_traffic

    habits: dict[str, StepTraffic] = {}
    for text in texts:
        pattern, _, file = text.partition("=")
        if not pattern or not file:
            raise InputError(f"--plan: '{text}'; write jobs and their plan, such as gpt=gpt.json")
        chosen = [job for job in jobs if fnmatchcase(job, pattern)]
        if not chosen:
            raise InputError(f"--plan: no job is called '{pattern}'; {hint(pattern, jobs)}")
        steps = step_traffic(Path(file).stem, load_estimate(Path(file), Sources()))
        habits |= dict.fromkeys(chosen, steps)
    return habits


def that_fit(
    grounds: Grounds, requests: list[tuple[float, JobRequest]], habits: dict[str, StepTraffic]
) -> list[tuple[float, JobRequest]]:
    """Leave each job that is a plan the shapes that the plan can run on; InputError: it has none.

    Jobs that ask for the same keep the same shapes: what the scheduler knows of a shape it knows
    of all of them.
    """
    from dataclasses import replace

    from tutti.fleet.network import fitting_shapes

    known: dict[tuple[int, tuple[Shape, ...]], tuple[Shape, ...]] = {}
    fitting = []
    for time, request in requests:
        steps = habits.get(request.job)
        if steps is not None:
            key = (id(steps), request.shapes)
            if key not in known:
                try:
                    known[key] = fitting_shapes(grounds, steps, request.shapes)
                except InputError as error:
                    raise InputError(f"--plan: job '{request.job}': {error}") from None
            request = replace(request, shapes=known[key])
        fitting.append((time, request))
    return fitting


def shared_network(
    grounds: Grounds,
    traffic: str,
    share: float,
    habits: dict[str, StepTraffic],
    *,
    alone: bool = False,
) -> SharedNetwork | None:
    """Return the fabric with what its jobs send; None: nobody sends anything."""
    from tutti.fleet.network import Habit, Pattern, SharedNetwork

    if traffic not in _PATTERNS:
        raise InputError(f"--traffic: '{traffic}'; {hint(traffic, _PATTERNS)}")
    if traffic == "none":
        silent = Habit(share=0.0)
        return SharedNetwork(grounds, habits, silent, together=not alone) if habits else None
    try:
        habit = Habit(share=share, pattern=Pattern(traffic))
    except InputError as error:
        raise InputError(f"--share: {error}") from None
    return SharedNetwork(grounds, habits, usual=habit, together=not alone)
