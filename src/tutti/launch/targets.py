"""Where a job can be launched by files, and how its folder is written."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tutti.errors import InputError
from tutti.files import unwritable, write_text
from tutti.launch import kubernetes, slurm, torchrun
from tutti.launch.job import Job
from tutti.launch.secret import SECRET_NAME

_SCRIPTS = (".sh", ".sbatch")
_PRIVATE = (SECRET_NAME, f"{SECRET_NAME}.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One way to start a job elsewhere."""

    files: Callable[[Job], dict[str, str]]
    next_command: Callable[[Job, str], str]  # takes the folder, quoted for a shell
    notes: Callable[[Job], list[str]] = lambda _job: []  # what was assumed


TARGETS: Mapping[str, Target] = {
    "torchrun": Target(files=torchrun.torchrun_files, next_command=torchrun.next_command),
    "slurm": Target(
        files=slurm.slurm_files, next_command=slurm.next_command, notes=slurm.slurm_notes
    ),
    "kubernetes": Target(
        files=kubernetes.kubernetes_files,
        next_command=kubernetes.next_command,
        notes=kubernetes.kubernetes_notes,
    ),
}


def next_command(target: str, job: Job, folder: Path) -> str:
    """Return what to type next."""
    return TARGETS[target].next_command(job, shlex.quote(str(folder)))


def write_folder(folder: Path, files: Mapping[str, str], *, force: bool = False) -> None:
    """Write all files or none; those that are there already only when forced."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; name a folder")
    for name in files:
        if (folder / name).is_dir():
            raise InputError(f"{folder}: {name} is a folder there; choose another one")
    taken = sorted(name for name in files if (folder / name).exists())
    if taken and not force:
        more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
        raise InputError(
            f"{folder}: {taken[0]}{more} would be overwritten; choose another folder, or --force"
        )
    try:
        staged = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as error:
        raise unwritable(folder, error) from None
    try:
        for name, text in files.items():
            write_text(staged / name, text)
            if name in _PRIVATE:
                (staged / name).chmod(0o600)
            if name.endswith(_SCRIPTS):
                mode = (staged / name).stat().st_mode
                (staged / name).chmod(mode | (mode & 0o444) >> 2)  # whoever reads may execute
        folder.mkdir(exist_ok=True)
        for name in files:
            (staged / name).replace(folder / name)
    except OSError as error:
        raise unwritable(folder, error) from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)
