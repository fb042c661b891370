"""`tutti launch`: files that start a plan on a cluster, or the command that runs it here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json
from tutti.errors import InputError, hint
from tutti.units import many

if TYPE_CHECKING:
    from tutti.launch.job import Job

_TARGETS = ("local", "torchrun", "slurm", "kubernetes")
_NO_CONFIG = "without --config the job trains random weights on synthetic data"


def launch(
    plan: Annotated[Path, typer.Argument(help="A plan file.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Further arguments of `tutti train` or `tutti serve`, after a --."),
    ] = None,
    to: Annotated[str, typer.Option(help="local, torchrun, slurm or kubernetes.")] = "local",
    config: Annotated[
        Path | None, typer.Option(help="The training configuration: `tutti train CONFIG`.")
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Of a plan that serves: the model, as every host sees it."
        ),
    ] = None,
    with_: Annotated[
        Path | None,
        typer.Option("--with", help="Launch facts: images, partitions, hosts, volumes."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to write the files to.")
    ] = Path("launch"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite files there.")] = False,
    run: Annotated[bool, typer.Option("--run", help="With --to local: run it now.")] = False,
    model: Annotated[
        str | None, typer.Option(help="The model, where the plan does not embed it.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="The cluster, where the plan does not embed it.")
    ] = None,
    json: Json = False,
) -> None:
    """Write what starts a plan elsewhere: one job per pool, each with its image and devices."""
    if to not in _TARGETS:
        raise InputError(f"--to: '{to}'; {hint(to, _TARGETS)}")
    if run and to != "local":
        raise InputError(f"--run: goes with --to local only; the files for {to} say how to start")
    text = None if config is None else _config_text(config, travels=to != "local")
    job = _load(plan, text, with_, model, cluster, arguments or [], serve)
    if job.serves and to != "local" and not job.model_folder.startswith("/"):
        raise InputError(f"--serve: '{serve}'; write the whole path, as the hosts see it")
    if to == "local":
        _local(job, plan, config, run, json)
    else:
        _write(job, to, output, force, json)


def _config_text(path: Path, *, travels: bool) -> str:
    """Return a training file that is right, and means the same wherever it is read."""
    from tutti.document import Place, build, plain
    from tutti.files import read_file, read_text
    from tutti.train.run.config import TrainConfig

    config = build(TrainConfig, read_file(path), Place(path.name))
    if travels:
        here = config.relative_to(path.resolve().parent)
        for key, name in _differences(plain(config), plain(here)):
            if key not in ("cluster", "plan"):  # the launched plan stands for both
                raise InputError(
                    f"{path.name}: '{key}' is '{name}', seen from where the file lies; it travels "
                    "to other hosts, so write the whole path as they see it"
                )
    return read_text(path)


def _differences(one: object, other: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield each value of `one` that is another in `other`, with its key."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name, value in one.items():
            yield from _differences(value, other.get(name), f"{key}.{name}".lstrip("."))
    elif isinstance(one, list) and isinstance(other, list):
        for index, (value, theirs) in enumerate(zip(one, other, strict=True)):
            yield from _differences(value, theirs, f"{key}[{index}]")
    elif one != other:
        yield key, one


def _load(
    plan: Path,
    config: str | None,
    with_: Path | None,
    model: str | None,
    cluster: str | None,
    arguments: list[str],
    serve: str | None,
) -> Job:
    from dataclasses import replace

    from tutti.hardware.cluster import Cluster
    from tutti.launch.facts import Facts
    from tutti.launch.job import Job
    from tutti.models.load import load_model
    from tutti.plan.check import require_valid
    from tutti.plan.files import load_plan, refer_to_cluster, refer_to_model

    loaded = load_plan(plan)
    if model is not None:
        loaded = replace(loaded, model=refer_to_model(load_model(model)))
    if cluster is not None:
        loaded = replace(loaded, cluster=refer_to_cluster(Cluster.load(cluster)))
    if (loaded.job.serving is None) != (serve is None):
        raise InputError(
            f"{plan.name}: is for training; leave --serve out"
            if serve is not None
            else f"{plan.name}: serves; say which model: --serve FOLDER, as every host sees it"
        )
    if serve is not None and config is not None:
        raise InputError(f"{plan.name}: serves; --config is for training, leave it out")
    require_valid(loaded)
    return Job.of(
        loaded,
        Facts.load(with_) if with_ is not None else Facts(),
        config=config,
        model_folder=serve or "",
        arguments=arguments,
        facts_name=with_.name if with_ is not None else "launch facts",
    )


def _local(job: Job, plan: Path, config: Path | None, run: bool, json: bool) -> None:
    from tutti.launch.local import local_command

    command = local_command(job, plan, config)
    if run:
        from tutti.plan.check import embedded_cluster
        from tutti.ranks.local_capacity import require_chips_here

        environ = {**os.environ, **command.environment}
        require_chips_here(job.plan, embedded_cluster(job.plan), environ)
    if json:
        print_json(
            {
                "target": "local",
                "command": list(command.words),
                "environment": command.environment,
                "files": [],
            }
        )
        return
    typer.echo(str(command))
    if command.num_hosts > 1:
        typer.echo(
            f"note: the plan has {command.num_hosts} hosts; here all "
            f"{job.plan.num_ranks} ranks share this machine",
            err=True,
        )
    if run:
        command.execute()


def _write(job: Job, target: str, folder: Path, force: bool, json: bool) -> None:
    from tutti.launch.targets import TARGETS, next_command, write_folder

    files = TARGETS[target].files(job)
    write_folder(folder, files, force=force)
    command = next_command(target, job, folder)
    untold = job.config is None and not job.serves
    notes = TARGETS[target].notes(job) + ([_NO_CONFIG] if untold else [])
    if json:
        print_json(_document(job, target, folder, sorted(files), command, notes))
        return
    for part in job.parts:
        ranks = sorted(rank for host in part.component.hosts for rank in host.ranks)
        typer.echo(f"{part.component}, {many(len(ranks), 'rank')}")
    for name in sorted(files):
        typer.echo(f"written to {folder / name}")
    typer.echo(f"next: {command}")
    for note in notes:
        typer.echo(f"note: {note}", err=True)


def _document(
    job: Job, target: str, folder: Path, names: list[str], command: str, notes: list[str]
) -> dict[str, Any]:
    return {
        "target": target,
        "name": job.name,
        "files": [str(folder / name) for name in names],
        "next": command,
        "notes": notes,
        "hosts": [
            {
                "node": host.name,
                "component": part.name,
                "host": part.host_name(host) or None,
                "ranks": list(host.ranks),
            }
            for part, host in job.hosts()
        ],
    }
