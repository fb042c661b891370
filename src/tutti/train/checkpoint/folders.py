"""The folder of a run's checkpoints: names, what is complete, what may go.

`step-000100` is complete, because it got that name after everything in it was on the disk. Half
done are `step-000100.partial` (being written) and `step-000100.removed` (being deleted);
`step-000100.old` is a complete one while another of the same step takes its name. Which is newest
is told by the serial number in it: steps may come again after a restart, clocks may be wrong. The
file `latest` names it for people. Whatever moment a process ends at, `find_latest` finds a complete
one, and `tidy` puts the folder in order.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tutti.errors import InputError
from tutti.train.checkpoint.manifest import damage, read_manifest

LATEST = "latest"
PARTIAL, REMOVED, OLD = ".partial", ".removed", ".old"
_NAME = re.compile(r"step-(\d{6,})")
Say = Callable[[str], None]


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:06}"


def step_of(name: str) -> int | None:
    """Return the step of a complete checkpoint's folder, by its name; None for another folder."""
    found = _NAME.fullmatch(name)
    return int(found.group(1)) if found else None


def complete_folders(folder: Path) -> list[Path]:
    """Return all checkpoints by rising step; those that `.old` still keeps, too."""
    if not folder.is_dir():
        return []
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):  # "step-1" comes before "step-1.old"
        step = step_of(path.name.removesuffix(OLD))
        if step is not None and path.is_dir():
            found.setdefault(step, path)
    return [found[step] for step in sorted(found)]


def find_latest(folder: Path, say: Say = lambda _line: None) -> Path | None:
    """Return the complete checkpoint that was saved last; None if there is none."""
    sound = []
    for path in complete_folders(folder):
        problem = damage(path)
        if problem is None:
            sound.append((read_manifest(path).serial, path))
        else:
            say(f"checkpoint {path.name} is not used: {problem}")
    return max(sound)[1] if sound else None


def next_serial(folder: Path) -> int:
    """Return the number of the next save in this folder."""
    latest = find_latest(folder)
    return 1 if latest is None else read_manifest(latest).serial + 1


def resolve(folder: Path, which: str | Path, say: Say = lambda _line: None) -> Path:
    """Return the folder that a person means: "latest", a name in the run's folder, or a path."""
    if str(which) == LATEST:
        found = find_latest(folder, say)
        if found is None:
            raise InputError(f"{folder}: holds no complete checkpoint to resume from")
        return found
    path = Path(which)
    if not path.is_dir() and (folder / path).is_dir():
        path = folder / path
    problem = damage(path)
    if problem is not None:
        raise InputError(problem)
    return path


# --- changing it ---------------------------------------------------------------------------


def flush_folder(path: Path) -> None:
    """Wait until a folder's names are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_flushed(path: Path, text: str) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def begin(folder: Path, step: int) -> Path:
    """Return a fresh folder to write a checkpoint in."""
    path = folder / (folder_name(step) + PARTIAL)
    folder.mkdir(parents=True, exist_ok=True)
    if path.exists():
        shutil.rmtree(path)
    path.mkdir()
    return path


def publish(partial: Path) -> Path:
    """Give a written folder its name and make it the latest."""
    folder = partial.parent
    target = folder / partial.name.removesuffix(PARTIAL)
    old = folder / (target.name + OLD)
    for path in [partial, *(path for path in partial.rglob("*") if path.is_dir())]:
        flush_folder(path)
    if target.exists():
        if old.exists():
            remove(old)
        target.rename(old)
    partial.rename(target)
    flush_folder(folder)
    marker = folder / f".{LATEST}"
    write_flushed(marker, target.name + "\n")
    marker.replace(folder / LATEST)
    flush_folder(folder)
    if old.exists():
        remove(old)
    return target


def remove(path: Path) -> None:
    """Delete a checkpoint; half deleted, it no longer has the name of one."""
    gone = path
    if not path.name.endswith((REMOVED, PARTIAL)):
        gone = path.parent / (path.name + REMOVED)
        if gone.exists():
            shutil.rmtree(gone)
        path.rename(gone)
    shutil.rmtree(gone)


def tidy(folder: Path, say: Say = lambda _line: None) -> None:
    """Put in order what processes left that ended while they saved or deleted."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        stem = path.name.split(".", 1)[0]
        if step_of(stem) is None or not path.is_dir() or path.name == stem:
            continue
        if path.name.endswith(OLD) and not (folder / stem).exists():
            path.rename(folder / stem)
            say(f"checkpoint {stem} is put back: another of that step was not finished")
        elif path.name.endswith((PARTIAL, REMOVED, OLD)):
            shutil.rmtree(path)
            if path.name.endswith(PARTIAL):
                say(f"checkpoint {path.name} was not finished: removed")


def superseded(
    saved: Sequence[tuple[int, int]], *, keep_last: int, keep_every: int | None
) -> set[int]:
    """Return the steps that may go, of (serial, step); never the last one saved. Pure."""
    order = [step for _, step in sorted(saved)]
    kept = set(order[-max(1, keep_last) :])
    if keep_every:
        kept |= {step for step in order if step % keep_every == 0}
    return set(order) - kept


def retire(folder: Path, *, keep_last: int, keep_every: int | None) -> list[str]:
    """Delete what the rule lets go; return the names. What is damaged is neither kept nor counted.

    A damaged folder is left where it is: only a person can tell whether anything in it is of use.
    """
    found: dict[int, Path] = {}
    saved: list[tuple[int, int]] = []
    for path in complete_folders(folder):
        step = step_of(path.name)
        if step is not None and damage(path) is None:
            found[step] = path
            saved.append((read_manifest(path).serial, step))
    gone = superseded(saved, keep_last=keep_last, keep_every=keep_every)
    _remove_all(found[step] for step in sorted(gone))
    return [found[step].name for step in sorted(gone)]


def _remove_all(paths: Iterable[Path]) -> None:
    for path in paths:
        remove(path)
