"""Jobs that are models: the planner is asked what mixes of pools are worth to them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tutti.cli.shared.progress import progress_bar

if TYPE_CHECKING:
    from tutti.fleet.model_jobs import MixTable
    from tutti.fleet.traces.trace import Trace
    from tutti.hardware.cluster import Cluster

MixFile = Annotated[
    Path | None,
    typer.Option(
        "--mixes", metavar="FILE",
        help="Where the planner's answers are kept, of jobs that are models; gone on with.",
    ),
]  # fmt: skip


def asked_mixes(trace: Trace, cluster: Cluster, file: Path | None, *, shown: bool) -> MixTable:
    """Return what mixes are worth to the models of a trace; what is not known yet is asked."""
    from tutti.fleet.model_jobs import MixTable

    table = MixTable.load(cluster, file)
    models = [row.training for row in trace.rows if row.training is not None]
    if models:
        with progress_bar("count", "asking the planner", wanted=shown) as update:
            table.fill(models, update)
    return table
