"""`tutti validate --run`: a traced run against its prediction, and a profile scaled by it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tutti.cli.predict import load_estimate, load_sources
from tutti.cli.shared.compared import kinds_document, kinds_table
from tutti.cli.shared.output import print_json, print_rich
from tutti.cost.measured.pools import profile_of
from tutti.cost.measured.rescale import PassFactors, rescaled
from tutti.errors import InputError, hint
from tutti.files import read_file, require_folder
from tutti.observe.folder import PLAN_FILE, RUN_FILE, trace_name
from tutti.plan.check import embedded_cluster
from tutti.plan.files import load_plan
from tutti.schedule.instruction import Op
from tutti.simulate.compare import KindTimes, compare_kinds
from tutti.simulate.measured import MeasuredStep, read_measured

if TYPE_CHECKING:
    from tutti.cost.plan.sources import Sources
    from tutti.simulate.result import SimulationResult

_FORWARD = (Op.FORWARD, Op.RECOMPUTE)
_BACKWARD = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_OPTIMIZER = (Op.STEP,)


def validate_run(
    folder: Path,
    *,
    step: int | None,
    chip_profiles: Sequence[str],
    pool: str | None,
    output: Path | None,
    json: bool,
) -> None:
    """Compare a traced step with its prediction; write the profile of a pool's chip anew."""
    traces = _traces(folder, step)
    names = list(chip_profiles) or _profiles_of(folder)
    sources = load_sources(None, None, names, extrapolate=False)
    result = load_estimate(folder / PLAN_FILE, sources).result
    steps = [read_measured(path, result.program) for path in traces]
    steps.sort(key=lambda measured: measured.step_seconds)
    typical = steps[(len(steps) - 1) // 2]  # one that nothing disturbed, if most were not
    if output is not None:
        _write(output, folder, result, typical, sources, pool)
    if json:
        pools = dict.fromkeys(own.pool for own in typical.ranks)
        factors = {name: _factors(compare_kinds(result, typical, name)) for name in pools}
        shown = {
            name: {"forward": f.forward, "backward": f.backward, "optimizer": f.optimizer}
            for name, f in factors.items()
        }
        print_json({**kinds_document(result, typical), "factors": shown})
        return
    print_rich(kinds_table(result, typical))
    if output is not None:
        typer.echo(f"written to {output}")


def _traces(folder: Path, step: int | None) -> list[Path]:
    """Return the traces to choose from."""
    require_folder(folder)
    if step is not None:
        return [folder / trace_name(step)]
    paths = {int(p.stem.rpartition("-")[2]): p for p in folder.glob("trace-step-*.json")}
    if not paths:
        raise InputError(f"{folder}: has no trace; let the run write one: tutti train --trace 10")
    return [paths[number] for number in sorted(paths)]


def _profiles_of(folder: Path) -> list[str]:
    """Return the profiles that the run's plan was made with."""
    written = read_file(folder / RUN_FILE)
    job = written.get("job") if isinstance(written, dict) else None
    names = job.get("chip_profiles", ()) if isinstance(job, dict) else ()
    return [_found(folder.resolve(), str(name)) for name in names]


def _found(folder: Path, name: str) -> str:
    """Return a profile's path; older runs wrote it as seen from where they were started."""
    if Path(name).exists():
        return name
    places = (parent / name for parent in (folder, *folder.parents))
    return next((str(place) for place in places if place.is_file()), name)


def _write(
    output: Path,
    folder: Path,
    result: SimulationResult,
    measured: MeasuredStep,
    sources: Sources,
    pool: str | None,
) -> None:
    pools = list(dict.fromkeys(own.pool for own in measured.ranks))
    if pool is None and len(pools) > 1:
        raise InputError(f"-o: writes one profile; name its pool with --pool ({', '.join(pools)})")
    chosen = pool or pools[0]
    if chosen not in pools:
        raise InputError(f"--pool {chosen}: the run has none; {hint(chosen, pools)}")
    chip = embedded_cluster(load_plan(folder / PLAN_FILE)).pool(chosen).chip
    base = profile_of(sources.profiles, chip)
    if base is None:
        raise InputError(
            f"-o: the run was priced without a profile of {chip.name}; measure one with "
            "tutti profile and give it as --chip-profile"
        )
    factors = _factors(compare_kinds(result, measured, chosen))
    why = (
        f"scaled by step {measured.step} of a run of {result.program.schedule.plan.model.name} on "
        f"{chosen}: forward {factors.forward:.3f}, backward {factors.backward:.3f}, "
        f"optimizer {factors.optimizer:.3f}{', emulated' if measured.emulated else ''}"
    )
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    rescaled(base, factors, why=why, date=today).save(output)


def _factors(kinds: Sequence[KindTimes]) -> PassFactors:
    def ratio(ops: Sequence[Op]) -> float:
        measured = sum(kind.measured_s for kind in kinds if kind.op in ops)
        predicted = sum(kind.predicted_s for kind in kinds if kind.op in ops)
        return measured / predicted if measured and predicted else 1.0

    return PassFactors(
        forward=ratio(_FORWARD), backward=ratio(_BACKWARD), optimizer=ratio(_OPTIMIZER)
    )
