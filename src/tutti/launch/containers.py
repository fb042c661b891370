"""Containers around `start.sh`, where no Kubernetes starts them: Apptainer, and pyxis in Slurm."""

from __future__ import annotations

import shlex

from tutti.launch.job import Job, Part


def wrapper(job: Job, part: Part, here: str = "$here") -> str:
    """Return what stands before `bash start.sh`, with a blank behind; empty without a container.

    `here` is what the shell calls the folder of the launch files where the line is used.
    """
    facts = part.launch.facts
    if facts.container != "apptainer":
        return ""
    words = ["apptainer", "exec", *part.launch.container_options]
    binds = [f"--bind={shlex.quote(text)}" for text in _mounts(job, part)]
    shown = [*map(shlex.quote, words), f'--bind="{here}"', *binds, shlex.quote(facts.image)]
    return " ".join(shown) + " "


def step_options(job: Job, part: Part) -> list[str]:
    """Return the options by which pyxis teaches srun about containers."""
    facts = part.launch.facts
    if facts.container != "pyxis":
        return []
    mounts = ",".join(_mounts(job, part))
    return [
        f"--container-image={shlex.quote(facts.image)}",
        '--container-mounts="$here:$here"' + (f",{shlex.quote(mounts)}" if mounts else ""),
        *map(shlex.quote, part.launch.container_options),
    ]


def _mounts(job: Job, part: Part) -> list[str]:
    folder = job.facts.folder
    volumes = [volume for volume in part.launch.volumes if volume.host_path]
    mounts = [f"{v.host_path}:{v.mount}" + (":ro" if v.read_only else "") for v in volumes]
    return ([f"{folder}:{folder}"] if folder else []) + mounts
