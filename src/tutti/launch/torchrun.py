"""`--to torchrun`: one script that starts the processes of any host, and one that starts it on all.

For machines without a scheduler. The folder must lie on every host, best on shared storage.
"""

from __future__ import annotations

from tutti.launch.containers import wrapper
from tutti.launch.job import Job, Part
from tutti.launch.secret import SECRET_NAME, new_secret
from tutti.launch.templating import render


def torchrun_files(job: Job) -> dict[str, str]:
    """Return the files by name; `run.sh` only where every host's name is known."""
    job.require_container("none", "apptainer")
    job.require_elastic()
    master = _master(job)
    typed = {part.name: wrapper(job, part, "$PWD") for part in job.parts}
    files = {
        "start.sh": render(
            "start.sh.j2", job=job, slurm=False, patterns=patterns(job), master=master
        ),
        "commands.txt": render("commands.txt.j2", job=job, wrappers=typed, master=master),
        SECRET_NAME: new_secret() + "\n",
        **job.inputs(),
    }
    if all(part.launch.hosts for part in job.parts):
        wrappers = {part.name: wrapper(job, part) for part in job.parts}
        files["run.sh"] = render("run.sh.j2", job=job, wrappers=wrappers)
    return files


def _master(job: Job) -> str:
    part, host = next(job.hosts())
    return part.host_name(host)


def patterns(job: Job) -> dict[str, str]:
    """Return what a shell's `case` matches the nodes of each component by."""
    return {part.name: _pattern(job, part) for part in job.parts}


def _pattern(job: Job, part: Part) -> str:
    pool = part.launch.pool.name
    if sum(other.launch.pool.name == pool for other in job.parts) == 1:
        return f"{pool}/*"
    return " | ".join(host.name for host in part.component.hosts)


def next_command(job: Job, folder: str) -> str:
    """Return what to type next."""
    if all(part.launch.hosts for part in job.parts):
        return f"bash {folder}/run.sh"
    return f"on every host its line of {folder}/commands.txt"
