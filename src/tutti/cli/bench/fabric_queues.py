"""`tutti bench fabric queues`: does the detector of pauses name kind and origin of drawn cases."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tutti.cli.shared.output import Json, print_json


def queues(
    cases: Annotated[int, typer.Argument(help="How many cases of each kind.", min=1)] = 10,
    json: Json = False,
) -> None:
    """Draw storms, incasts, circular waits and healthy bursts in the queue model: are they named.

    The detector judges by the counters of ports alone.
    """
    from tutti.bench.beds.queue_cases import KINDS, run_case

    judged = [run_case(kind, seed) for kind in KINDS for seed in range(cases)]
    if json:
        print_json({"cases": [asdict(one) | {"right": one.right} for one in judged]})
        return
    for kind in KINDS:
        own = [one for one in judged if one.kind == kind]
        typer.echo(f"{kind}: {sum(one.right for one in own)} of {len(own)} right")
    for one in judged:
        if not one.right:
            said = "; ".join(finding.words() for finding in one.findings) or "nothing"
            typer.echo(f"{one.kind} {one.seed} at {', '.join(one.origin)}: {said}")
