"""What is looked at before a run begins: its inputs, and what an earlier run left in its folder.

All of it is answered before a rank is started. Needs no torch.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tutti.elastic.journal import GENERATION
from tutti.errors import InputError
from tutti.observe.folder import (
    AVERAGED,
    CHECKPOINTS,
    EVALUATIONS,
    EXPORT,
    METRICS,
    SAMPLES,
    SOON,
    TENSORBOARD,
    trace_name,
)
from tutti.train.checkpoint.folders import LATEST, clear, complete_folders, resolve
from tutti.train.checkpoint.manifest import Manifest, Progress, check_model, read_manifest
from tutti.train.checkpoint.remote import RemoteRun
from tutti.train.data.open_data import check_data
from tutti.train.run.claim import Claim, claim
from tutti.train.run.config import TrainConfig
from tutti.train.run.planning import Job, require_held_out
from tutti.train.run.weights import model_folder, wants_pretrained
from tutti.units import many

Resume = bool | int
"""Whether a run goes on: from its newest checkpoint (True), or from that of a step."""


def which_checkpoint(resume: Resume) -> str | int:
    """Return the checkpoint that a resume means."""
    return LATEST if resume is True else int(resume)


def check_inputs(config: TrainConfig, resume: Resume, *, overwrite: bool = False) -> None:
    """Refuse what would only be found missing by ranks, and a folder that holds another run."""
    check_sources(config, resume, overwrite=overwrite)
    if resume is False and not overwrite:
        require_fresh(config.folder)
        require_fresh_url(config.checkpoints.to)


def check_sources(config: TrainConfig, resume: Resume, *, overwrite: bool = False) -> None:
    """Refuse data, weights or a checkpoint that are not there."""
    if resume is not False and overwrite:
        raise InputError("--resume goes on with a run, --overwrite begins anew; choose one")
    require_held_out(config)
    if config.checkpoints.to:
        RemoteRun(config.checkpoints.to).folder.require_writable()
    check_data(config.data, model_folder=model_folder(config.model))
    if resume is False:
        wants_pretrained(config)
    elif not was_cut_off(config, resume):
        find_manifest(config, resume)


def was_cut_off(config: TrainConfig, resume: Resume) -> bool:
    """Tell whether an elastic run ended with its controller: agents may hold its state."""
    if config.elastic is None or resume is not True:
        return False
    from tutti.elastic.journal import read_journal
    from tutti.elastic.restore import is_over

    try:
        return not is_over(read_journal(config.folder))
    except InputError:
        return False


def check_resumed(job: Job, resume: Resume) -> None:
    """Refuse to go on under another model or another batch than the checkpoint's."""
    if resume is False:
        return
    if was_cut_off(job.config, resume) and not complete_folders(job.config.folder / CHECKPOINTS):
        return
    place, manifest = find_manifest(job.config, resume)
    check_model(place, manifest, job.spec)
    check_batch(manifest.progress, job.plan.job.global_batch)


def has_checkpoints(config: TrainConfig) -> bool:
    """Tell whether a run left any checkpoint, in its folder or under its URL."""
    url = config.checkpoints.to
    here = complete_folders(config.folder / CHECKPOINTS)
    return bool(here) or bool(url and RemoteRun(url).newest_first())


def find_manifest(config: TrainConfig, resume: Resume) -> tuple[str, Manifest]:
    """Return where the checkpoint is that a run goes on from, and what it says of itself."""
    which = which_checkpoint(resume)
    there = RemoteRun(config.checkpoints.to).resolve(which) if config.checkpoints.to else []
    try:
        path = resolve(config.folder / CHECKPOINTS, which)[0]
        manifest = read_manifest(path)
    except InputError:
        if not there:
            raise
    else:
        if not there or there[0].serial <= manifest.serial:
            return str(path), manifest
    run = RemoteRun(config.checkpoints.to)
    return f"{run.folder.url}/{there[0].folder}", run.manifest(there[0])


def check_batch(progress: Progress, batch: int) -> None:
    """Refuse another global batch: the samples of a step follow from it."""
    if progress.samples != progress.step * batch:
        before = progress.samples / max(progress.step, 1)
        raise InputError(
            f"the checkpoint's run had a global batch of {before:g}, the plan has {batch}; go on "
            "with a plan of the same batch, or begin anew in another output folder"
        )


def take_folder(folder: Path, url: str = "", *, overwrite: bool, fresh: bool) -> Claim:
    """Hold a run's folder, emptied of an earlier run with `overwrite`, refused if `fresh`."""
    held = claim(folder)
    try:
        if overwrite:
            clear_run(folder, url)
        elif fresh:
            require_fresh(folder)
    except BaseException:
        held.release()
        raise
    return held


# --- an earlier run --------------------------------------------------------------------------


def require_fresh(folder: Path) -> None:
    """Refuse a folder with figures, checkpoints or an export of an earlier run."""
    earlier = _earlier(folder)
    if earlier:
        raise InputError(
            f"{folder}: holds {earlier} of an earlier run; go on with it (--resume), begin anew "
            "over it (--overwrite), or name another --output"
        )


def require_fresh_url(url: str) -> None:
    """Refuse a URL that names checkpoints of an earlier run, and one that cannot be used."""
    if not url:
        return
    checkpoints = RemoteRun(url).newest_first()
    if checkpoints:
        raise InputError(
            f"{url}: holds {many(len(checkpoints), 'checkpoint')} of an earlier run; go on with it "
            "(--resume), begin anew over it (--overwrite), or name another URL"
        )


def _earlier(folder: Path) -> str:
    count = len(complete_folders(folder / CHECKPOINTS))
    metrics = folder / METRICS
    remains = [
        many(count, "checkpoint") if count else "",
        "figures" if metrics.is_file() and metrics.stat().st_size else "",
        "a Hugging Face folder" if (folder / EXPORT).exists() else "",
    ]
    *most, last = [words for words in remains if words] or [""]
    return f"{', '.join(most)} and {last}" if most else last


def clear_run(folder: Path, url: str = "") -> None:
    """Delete what an earlier run left: checkpoints, figures, traces, the export; nothing else.

    Under its URL no checkpoint is named any more; their files go when the next one is sent.
    """
    if url and (remote := RemoteRun(url)).newest_first():
        remote.write_index([])
    clear(folder / CHECKPOINTS)
    for name in (EXPORT, AVERAGED, TENSORBOARD):
        shutil.rmtree(folder / name, ignore_errors=True)
    # but for the numbers of the last generations: whoever is left of the old run stays fenced
    elastic = [path for path in folder.glob("elastic/*") if not path.name.startswith(GENERATION)]
    lines = (folder / name for name in (METRICS, SOON, SAMPLES, EVALUATIONS))
    for path in (*lines, *folder.glob(trace_name("*")), *elastic):
        path.unlink(missing_ok=True)
