"""What is looked at before a run begins: its inputs, and what an earlier run left in its folder.

All of it is answered before a rank is started. Needs no torch.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tutti.errors import InputError
from tutti.observe.folder import CHECKPOINTS, EXPORT, METRICS, SOON, TENSORBOARD, trace_name
from tutti.train.checkpoint.folders import LATEST, clear, complete_folders, resolve
from tutti.train.checkpoint.manifest import Progress, check_model, read_manifest
from tutti.train.data.opening import check_data
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


def check_sources(config: TrainConfig, resume: Resume, *, overwrite: bool = False) -> None:
    """Refuse data, weights or a checkpoint that are not there."""
    if resume is not False and overwrite:
        raise InputError("--resume goes on with a run, --overwrite begins anew; choose one")
    require_held_out(config)
    check_data(config.data, model_folder=model_folder(config.model))
    if resume is False:
        wants_pretrained(config)
    elif not was_cut_off(config, resume):
        resolve(config.folder / CHECKPOINTS, which_checkpoint(resume))


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
    path = resolve(job.config.folder / CHECKPOINTS, which_checkpoint(resume))[0]
    manifest = read_manifest(path)
    check_model(path, manifest, job.spec)
    check_batch(manifest.progress, job.plan.job.global_batch)


def check_batch(progress: Progress, batch: int) -> None:
    """Refuse another global batch: the samples of a step follow from it."""
    if progress.samples != progress.step * batch:
        before = progress.samples / max(progress.step, 1)
        raise InputError(
            f"the checkpoint's run had a global batch of {before:g}, the plan has {batch}; go on "
            "with a plan of the same batch, or begin anew in another output folder"
        )


def take_folder(folder: Path, *, overwrite: bool, fresh: bool) -> Claim:
    """Hold a run's folder, emptied of an earlier run with `overwrite`, refused if `fresh`."""
    held = claim(folder)
    try:
        if overwrite:
            clear_run(folder)
        elif fresh:
            require_fresh(folder)
    except BaseException:
        held.release()
        raise
    return held


# --- an earlier run --------------------------------------------------------------------------


def require_fresh(folder: Path) -> None:
    """Refuse a folder with figures, checkpoints or an export of an earlier run."""
    found = _earlier(folder)
    if found:
        raise InputError(
            f"{folder}: holds {found} of an earlier run; go on with it (--resume), begin anew over "
            "it (--overwrite), or name another --output"
        )


def _earlier(folder: Path) -> str:
    count = len(complete_folders(folder / CHECKPOINTS))
    metrics = folder / METRICS
    found = [
        many(count, "checkpoint") if count else "",
        "figures" if metrics.is_file() and metrics.stat().st_size else "",
        "a Hugging Face folder" if (folder / EXPORT).exists() else "",
    ]
    *most, last = [words for words in found if words] or [""]
    return f"{', '.join(most)} and {last}" if most else last


def clear_run(folder: Path) -> None:
    """Delete what an earlier run left: checkpoints, figures, traces, the export; nothing else."""
    clear(folder / CHECKPOINTS)
    for name in (EXPORT, TENSORBOARD):
        shutil.rmtree(folder / name, ignore_errors=True)
    # but for the number of the last generation: whoever is left of the old run stays fenced
    elastic = [path for path in folder.glob("elastic/*") if path.name != "generation"]
    for path in (folder / METRICS, folder / SOON, *folder.glob(trace_name("*")), *elastic):
        path.unlink(missing_ok=True)
