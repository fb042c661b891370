"""The folder of a run's checkpoints: names, what is complete, what may go.

`step-000100` is complete, because it got that name after everything in it was on the disk. Half
done are `step-000100.1f0c.partial` (being written; the middle is each writer's own, so that one who
sleeps through the next one's save touches nothing of it) and `….removed` (being deleted);
`step-000100.old` is a complete one while another of the same step takes its name. Which is newest
is told by the serial number in it: steps may come again after a restart, clocks may be wrong. The
file `latest` names it for people, `best` the one with the lowest validation loss. Whatever moment a
process ends at, `find_latest` finds a complete one, and `tidy` puts the folder in order.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tutti.errors import InputError
from tutti.train.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    damage,
    manifest_text,
    read_manifest,
)

LATEST, BEST = "latest", "best"
PARTIAL, REMOVED, OLD = ".partial", ".removed", ".old"
_NAME = re.compile(r"step-(\d{6,})")
Say = Callable[[str], None]
Which = str | Path | int  # a checkpoint: "latest", its step, its name, or a path


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:06}"


def step_of(name: str) -> int | None:
    """Return the step of a complete checkpoint's folder, by its name; None for another folder."""
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def complete_folders(folder: Path) -> list[Path]:
    """Return all checkpoints by rising step; those that `.old` still keeps, too."""
    if not folder.is_dir():
        return []
    paths: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):  # "step-1" comes before "step-1.old"
        step = step_of(path.name.removesuffix(OLD))
        if step is not None and path.is_dir():
            paths.setdefault(step, path)
    return [paths[step] for step in sorted(paths)]


def newest_first(
    folder: Path, say: Say = lambda _line: None, *, besides: Collection[str] = ()
) -> list[tuple[Path, Manifest]]:
    """Return the complete checkpoints, the one that was saved last first; `besides` some names."""
    sound = []
    for path in complete_folders(folder):
        if path.name in besides:
            continue
        problem = damage(path)
        if problem is None:
            sound.append((path, read_manifest(path)))
        else:
            say(f"checkpoint {path.name} is not used: {problem}")
    return sorted(sound, key=lambda entry: -entry[1].serial)


def find_latest(folder: Path, say: Say = lambda _line: None) -> Path | None:
    """Return the complete checkpoint that was saved last; None if there is none."""
    checkpoints = newest_first(folder, say)
    return checkpoints[0][0] if checkpoints else None


def find_best(checkpoints: Iterable[tuple[Path, Manifest]]) -> Path | None:
    """Return the checkpoint with the lowest validation loss; None where none was taken."""
    losses = [
        (manifest.progress.validation_loss, manifest.serial, path)
        for path, manifest in checkpoints
        if manifest.progress.validation_loss is not None
    ]
    return min(losses)[2] if losses else None


def next_serial(folder: Path) -> int:
    """Return the number of the next save in this folder."""
    checkpoints = newest_first(folder)
    return checkpoints[0][1].serial + 1 if checkpoints else 1


def resolve(folder: Path, which: Which, say: Say = lambda _line: None) -> list[Path]:
    """Return the folder that a person means: a step, a name in the run's folder, or a path.

    Of "latest", those to try, the newest first.
    """
    if str(which) == LATEST:
        paths = [path for path, _ in newest_first(folder, say)]
        if not paths:
            raise InputError(f"{folder}: holds no complete checkpoint to resume from")
        return paths
    path = Path(str(which))
    if isinstance(which, int):
        path = folder / folder_name(which)
        if not path.is_dir():
            steps = [step_of(other.name.removesuffix(OLD)) for other in complete_folders(folder)]
            there = f"there are {', '.join(map(str, steps))}" if steps else "there is none at all"
            raise InputError(f"{folder}: holds no checkpoint of step {which}; {there}")
    elif not path.is_dir() and (folder / path).is_dir():
        path = folder / path
    problem = damage(path)
    if problem is not None:
        raise InputError(problem)
    return [path]


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
    path = folder / f"{folder_name(step)}.{uuid.uuid4().hex[:8]}{PARTIAL}"
    path.mkdir(parents=True)
    return path


def publish(partial: Path) -> Path:
    """Give a written folder its name and make it the latest.

    An InputError if a later run of the folder has put it away (`tidy`): whoever renames it first
    has it.
    """
    folder = partial.parent
    target = folder / partial.name.split(".", 1)[0]
    old = folder / (target.name + OLD)
    try:
        for path in [partial, *(path for path in partial.rglob("*") if path.is_dir())]:
            flush_folder(path)
        if target.exists():
            if old.exists():
                remove(old)
            target.rename(old)
        partial.rename(target)
    except FileNotFoundError:
        if old.exists() and not target.exists():
            old.rename(target)
        raise InputError(f"{partial}: was put away by a later process of this run") from None
    flush_folder(folder)
    _write_whole(folder / LATEST, target.name + "\n")
    if old.exists():
        remove(old)
    return target


def make_latest(path: Path) -> None:
    """Let an older checkpoint count as saved last: the run goes on from it, and so do restarts."""
    folder = path.parent
    if find_latest(folder) == path:
        return
    manifest = replace(read_manifest(path), serial=next_serial(folder))
    _write_whole(path / MANIFEST, manifest_text(manifest))
    _write_whole(folder / LATEST, path.name + "\n")


def _write_whole(path: Path, text: str) -> None:
    """Write a file that is there in its old or its new form, whenever the process ends."""
    fresh = path.with_name(f".{path.name}")
    write_flushed(fresh, text)
    fresh.replace(path)
    flush_folder(path.parent)


def remove(path: Path) -> None:
    """Delete a checkpoint; half deleted, it no longer has the name of one."""
    gone = path
    if not path.name.endswith(REMOVED):
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
            try:
                remove(path)
            except FileNotFoundError:  # whoever wrote it has just given it its name
                continue
            if path.name.endswith(PARTIAL):
                say(f"checkpoint {stem} was not finished: removed")


def superseded(
    saved: Sequence[tuple[int, int]],
    *,
    keep_last: int,
    keep_every: int | None,
    best: int | None = None,
) -> set[int]:
    """Return the steps that may go, of (serial, step); never the last one saved. Pure."""
    order = [step for _, step in sorted(saved)]
    kept = {*order[-max(1, keep_last) :], best}
    if keep_every:
        kept |= {step for step in order if step % keep_every == 0}
    return set(order) - kept


def retire(
    folder: Path,
    *,
    keep_last: int,
    keep_every: int | None,
    keep_best: bool = False,
    besides: Collection[str] = (),
) -> list[str]:
    """Delete what the rule lets go; return the names. What is damaged is neither kept nor counted.

    A damaged folder is left where it is: only a person can tell whether anything in it is of use.
    `besides` are those that were found damaged when they were loaded.
    """
    complete = [
        (step, path, manifest)
        for path, manifest in newest_first(folder, besides=besides)
        if (step := step_of(path.name)) is not None
    ]
    best = find_best((path, manifest) for _, path, manifest in complete) if keep_best else None
    gone = superseded(
        [(manifest.serial, step) for step, _, manifest in complete],
        keep_last=keep_last,
        keep_every=keep_every,
        best=None if best is None else step_of(best.name),
    )
    if best is not None and named(folder / BEST) != best.name:
        _write_whole(folder / BEST, best.name + "\n")
    retired = sorted(path for step, path, _ in complete if step in gone)
    _remove_all(retired)
    return [path.name for path in retired]


def named(marker: Path) -> str:
    """Return the name in a marker such as `best`; empty where there is none."""
    return marker.read_text(encoding="utf-8").strip() if marker.is_file() else ""


def clear(folder: Path) -> None:
    """Delete every checkpoint of a folder, whole or not, and what names them; nothing else."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and step_of(path.name.split(".", 1)[0]) is not None:
            remove(path)
    for name in (LATEST, BEST):
        (folder / name).unlink(missing_ok=True)


def _remove_all(paths: Iterable[Path]) -> None:
    for path in paths:
        remove(path)
