"""`--to slurm`: a heterogeneous job with one component per pool; each host runs `start.sh`.

The batch script runs on the first host of component 0, which holds rank 0. It pairs the hosts that
Slurm chose with the nodes of the plan, so that nothing hangs on how Slurm numbers nodes across
components.
"""

from __future__ import annotations

from collections.abc import Mapping

from tutti.errors import InputError
from tutti.launch import containers
from tutti.launch.apart import mistaken_pools
from tutti.launch.facts import PoolLaunch
from tutti.launch.hosts import dns_label
from tutti.launch.job import Job, Part
from tutti.launch.secret import SECRET_NAME, new_secret
from tutti.launch.templating import render
from tutti.launch.torchrun import patterns

WARNING_S = 180  # before its time is up, an elastic job saves and is put back


def slurm_files(job: Job) -> dict[str, str]:
    """Return the files by name."""
    job.require_container("none", "apptainer", "pyxis")
    job.require_elastic()
    heterogeneous = len(job.parts) > 1
    typed = _typed(job)
    script = render(
        "job.sbatch.j2",
        job=job,
        common=_common_options(job),
        options={part.name: _options(job, part, typed) for part in job.parts},
        step={
            part.name: _step(job, part, index if heterogeneous else None)
            for index, part in enumerate(job.parts)
        },
        wrappers={part.name: containers.wrapper(job, part) for part in job.parts},
        named={part.name: _named(part) for part in job.parts if part.launch.hosts},
        all_named=all(part.launch.hosts for part in job.parts),
    )
    start = render("start.sh.j2", job=job, slurm=True, patterns=patterns(job))
    secret = {SECRET_NAME: new_secret() + "\n"}
    return {"job.sbatch": script, "start.sh": start, **secret, **job.inputs()}


def _common_options(job: Job) -> list[str]:
    slurm = job.facts.slurm
    given = {
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time,
        "reservation": slurm.reservation,
    }
    for option in slurm.options:
        if not option.startswith("--"):
            raise InputError(
                f"slurm: options: '{option}': write each as sbatch takes it, such as "
                "'--mail-type=END'"
            )
    options = [f"--{name}={value}" for name, value in given.items() if value]
    if job.goes_on:  # a lost host does not end the job; a lost leader puts it back
        options += ["--no-kill", "--requeue", f"--signal=B:TERM@{WARNING_S}"]
    return [_directive(option) for option in (*options, *slurm.options)]


def _directive(option: str) -> str:
    """Return an option if sbatch reads it back from its line as one."""
    if option.split() != [option] or "#" in option:
        raise InputError(
            f"slurm: '{option}' cannot stand in a batch script; leave out blanks and #"
        )
    return option


def _apart(one: PoolLaunch, other: PoolLaunch) -> bool:
    """Tell whether a pool asks for hosts that are not the other's."""
    partition = one.facts.partition
    return bool(
        one.hosts or one.facts.constraint or (partition and partition != other.facts.partition)
    )


def _typed(job: Job) -> dict[str, str]:
    """Return, by pool, what its chips are asked for as where `gpu` alone could be another's.

    Slurm writes a type behind the device's name, `gpu:a100`; the default is the chip's name.
    """
    mistaken = mistaken_pools(job, lambda launch: launch.gres, _apart)
    return {
        launch.pool.name: f"{launch.gres}:{dns_label(launch.pool.chip.name)}"
        for launch in mistaken
        if launch.facts.gres is None
    }


def slurm_notes(job: Job) -> list[str]:
    """Return what a reader of the files should know."""
    typed = _typed(job)
    if not typed:
        return []
    asked = ", ".join(f"{pool}: {gres}" for pool, gres in typed.items())
    return [
        f"Slurm is asked for chips by their type ({asked}); if gres.conf calls them otherwise, "
        "say 'gres', 'constraint' or 'partition' per pool in a launch file (--with)"
    ]


def _options(job: Job, part: Part, typed: Mapping[str, str]) -> list[str]:
    """Return the directives of one component."""
    facts, launch, component = part.launch.facts, part.launch, part.component
    options = [f"--nodes={len(component.hosts)}", "--ntasks-per-node=1"]
    if facts.partition:
        options.append(f"--partition={facts.partition}")
    if launch.gres:
        gres = typed.get(launch.pool.name, launch.gres)
        options.append(f"--gres={gres}:{part.num_devices}")
    elif not launch.known_maker:
        raise InputError(
            f"pool '{launch.pool.name}': nothing is known of chips by '{launch.pool.chip.vendor}'; "
            "say in a launch file (--with) what Slurm calls them, such as 'gres: gpu' ('' for none)"
        )
    if part.num_cpus is not None:
        options.append(f"--cpus-per-task={part.num_cpus}")
    if facts.memory:
        options.append(f"--mem={facts.memory}")
    if facts.constraint:
        options.append(f"--constraint={facts.constraint}")
    if launch.hosts:
        names = (part.host_name(host) for host in component.hosts)
        options.append(f"--nodelist={','.join(names)}")
    if part.is_exclusive:
        options.append("--exclusive")
    if job.facts.slurm.switches and len(component.hosts) > 1:
        options.append(f"--switches={job.facts.slurm.switches}")
    return [_directive(option) for option in options]


def _step(job: Job, part: Part, group: int | None) -> list[str]:
    """Return srun's options for one component."""
    hosts = len(part.component.hosts)
    options = [] if group is None else [f"--het-group={group}"]
    options += [f"--nodes={hosts}", f"--ntasks={hosts}", "--ntasks-per-node=1"]
    if part.num_cpus is not None:
        options.append(f"--cpus-per-task={part.num_cpus}")
    return [
        *options,
        *(
            ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
            if job.goes_on
            else ["--kill-on-bad-exit=1"]
        ),
        "--label",
        *containers.step_options(job, part),
    ]


def _named(part: Part) -> list[str]:
    return [f"{part.host_name(host)}={host.name}" for host in part.component.hosts]


def next_command(_job: Job, folder: str) -> str:
    """Return what to type next."""
    return f"cd {folder} && sbatch job.sbatch"
