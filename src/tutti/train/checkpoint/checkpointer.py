"""`Checkpointer`: saves and loads the state of a training job, whatever plans it runs under.

A save copies what the rank writes to the host and returns; a thread does the rest: every rank
writes its file, rank 0 checks that nothing is missing, writes metadata and manifest and gives the
folder its name. One save is under way at most. A save that fails is one line in the log, and the
folder is as it was before.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tutti.errors import InputError, TuttiError
from tutti.files import fingerprint, pretty_json
from tutti.huggingface.side_files import outside_links
from tutti.plan.files import plan_to_document
from tutti.train.checkpoint import folders
from tutti.train.checkpoint.contents import Piece, expected_keys, written_pieces
from tutti.train.checkpoint.coordinator import Coordinator
from tutti.train.checkpoint.loading import Missing
from tutti.train.checkpoint.manifest import (
    MANIFEST,
    MODEL_FOLDER,
    PLAN,
    Manifest,
    Progress,
    manifest_text,
    model_document,
    saved_file,
)
from tutti.train.checkpoint.model_files import copy_model_files
from tutti.train.checkpoint.places import FolderFiles
from tutti.train.checkpoint.random_state import random_state, restore_random_state
from tutti.train.checkpoint.remote import RemoteRun
from tutti.train.checkpoint.restore import Reading, Restore
from tutti.train.checkpoint.sending import Sending
from tutti.train.checkpoint.staging import Staging
from tutti.train.checkpoint.storage import StoredPart, prepare_format, write_metadata, write_part
from tutti.version import code_version

if TYPE_CHECKING:
    from tutti.train.engine.engine import Engine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """How a run saves."""

    keep_last: int = 3
    keep_every: int | None = None  # steps that are a multiple of this are never deleted
    keep_best: bool = False  # the one with the lowest validation loss is kept besides
    missing: Missing = "error"  # moments that a checkpoint lacks
    asynchronous: bool = True
    stop_on_failure: bool = False  # raise at the next step when a save failed
    to: str = ""  # a URL that checkpoints are sent to, and found at
    restore: Reading = "auto"  # who reads when a checkpoint is loaded

    def __post_init__(self) -> None:
        if self.keep_last < 1 or (self.keep_every is not None and self.keep_every < 1):
            raise InputError("checkpoints: 'keep_last' and 'keep_every' must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a save came to on this rank."""

    step: int
    problem: str  # one line; empty: it was saved
    staging_s: float  # how long training stood still
    writing_s: float  # in the background, until the folder had its name
    waiting_s: float  # for the save before, which was still under way
    num_bytes: int  # written by this rank


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """All that the background needs to know of the engine."""

    pieces: list[Piece]
    expected: Mapping[str, int]
    texts: Mapping[str, str]  # files of rank 0, by name
    manifest: Manifest  # without its files


class Checkpointer:
    """The checkpoints of one run, on one rank."""

    def __init__(
        self,
        folder: Path,
        settings: CheckpointSettings,
        coordinator: Coordinator,
        *,
        model_folder: Path | None = None,
        say: Callable[[str], None] = log.warning,
        may_publish: Callable[[], None] = lambda: None,
    ) -> None:
        """Put the folder in order; `model_folder` holds the config and tokenizer of an export."""
        self.folder, self.settings = folder, settings
        self._together, self._may_publish = coordinator, may_publish
        self._say = say if coordinator.rank == 0 else lambda _line: None
        self._model_folder = model_folder
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._outcome: Saved | None = None
        self.history: list[Saved] = []
        remote = RemoteRun(settings.to) if settings.to else None
        self._restore = Restore(
            folder, remote, coordinator, self._say, missing=settings.missing,
            reading=settings.restore,
        )  # fmt: skip
        self._sending = (
            Sending(remote, coordinator, self._superseded, may_publish) if remote else None
        )
        if coordinator.rank == 0:
            prepare_format()
            folders.tidy(folder, self._say)
            for name in outside_links(model_folder) if model_folder is not None else ():
                self._say(f"{model_folder}: the link {name} leads outside of it; it is not copied")
        coordinator.broadcast((True,))

    # --- saving ----------------------------------------------------------------------------

    def save(self, engine: Engine, progress: Progress) -> None:
        """Save the state after a step; every rank calls this at the same step."""
        asked = time.perf_counter()
        self.wait()
        began = time.perf_counter()
        waiting_s = began - asked
        pieces = written_pieces(engine)
        if self.settings.asynchronous:
            pieces = self._staging.copies(engine.accelerator, pieces)
        order = self._order(engine, progress, pieces)
        staging_s = time.perf_counter() - began

        def work() -> None:
            began = time.perf_counter()
            problem, num_bytes = self._carry_out(order)
            self._outcome = Saved(
                step=progress.step,
                problem=problem,
                staging_s=staging_s,
                writing_s=time.perf_counter() - began,
                waiting_s=waiting_s,
                num_bytes=num_bytes,
            )

        if not self.settings.asynchronous:
            work()
            self.poll()
            return
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> Saved | None:
        """Take note of a save that is over; the loop calls this after every step."""
        if self._outcome is None or (self._thread is not None and self._thread.is_alive()):
            return None
        outcome, self._outcome, self._thread = self._outcome, None, None
        self.history.append(outcome)
        if outcome.problem:
            line = self.failure(outcome)
            if self.settings.stop_on_failure:
                raise TuttiError(line)
            self._say(line)
        return outcome

    def failure(self, outcome: Saved) -> str:
        """Say in one line what failed, and which checkpoint is there."""
        kept = folders.find_latest(self.folder)
        last = f"the last one is {kept.name}" if kept else "there is none yet"
        return f"checkpoint of step {outcome.step} failed ({outcome.problem}); {last}"

    def wait(self) -> Saved | None:
        """Wait for the save that is under way, if any."""
        if self._thread is not None:
            self._thread.join()
        return self.poll()

    def close(self) -> None:
        """Finish what is under way and give the staging memory back."""
        try:
            self.wait()
        finally:
            self._staging.release()

    def _order(self, engine: Engine, progress: Progress, pieces: list[Piece]) -> _Order:
        plan, spec = engine.plan, engine.spec
        progress = replace(progress, loss_scale=engine.scaling.state_dict())
        document = plan_to_document(plan)
        return _Order(
            pieces=pieces,
            expected=expected_keys(engine) if self._together.rank == 0 else {},
            texts={PLAN: pretty_json(document) + "\n"},
            manifest=Manifest(
                progress=progress,
                updates=engine.step_number,
                serial=1,
                saved_at=time.time(),
                model_hash=spec.fingerprint,
                model=model_document(spec),
                plan_hash=fingerprint(document),
                world_size=self._together.size,
                precision=plan.job.precision,
                optimizer=plan.job.optimizer,
                version=code_version(),
                torch_version=str(torch.__version__),
                random=random_state(engine.accelerator),
                files={},
            ),
        )

    def _carry_out(self, order: _Order) -> tuple[str, int]:
        """Write a checkpoint together with the other ranks; return the problem, if any."""
        try:
            return self._write(order)
        except Exception as error:  # a thread must never end in silence
            return _reason(error), 0

    def _write(self, order: _Order) -> tuple[str, int]:
        together = self._together
        step = order.manifest.progress.step
        problem, name = self._begun(step) if together.rank == 0 else ("", "")
        problem, name = together.broadcast((problem, name))
        if problem:
            return problem, 0
        partial = self.folder / name
        part: StoredPart | str
        try:
            part = write_part(partial, together.rank, order.pieces)
        except Exception as error:
            part = _reason(error)
        told = together.gather(part if isinstance(part, str) else part.to_document())
        if told is not None:
            failed = [f"rank {r}: {p}" for r, p in enumerate(told) if isinstance(p, str)]
            parts = [] if failed else [StoredPart.from_document(p) for p in told]
            problem = failed[0] if failed else _attempt(lambda: self._finish(partial, order, parts))
            if problem:
                shutil.rmtree(partial, ignore_errors=True)
        problem = together.broadcast((problem,))[0]
        if not problem and self._sending is not None:
            problem = self._sent(self.folder / folders.folder_name(step))
        return problem, 0 if isinstance(part, str) else part.num_bytes

    def _begun(self, step: int) -> tuple[str, str]:
        """Begin a folder; return the problem, if any, and its name."""
        try:
            return "", folders.begin(self.folder, step).name
        except Exception as error:
            return _reason(error), ""

    # --- sending ---------------------------------------------------------------------------

    @property
    def read_bytes(self) -> int:
        """Bytes that this rank has read from the storage to restore checkpoints."""
        return self._restore.read_bytes

    def catch_up(self) -> None:
        """Send in the background what an earlier run saved and did not send; all ranks call it."""
        if self._sending is None:
            return
        path = self._sending.unsent(self.folder)
        if path is None:
            return

        def work() -> None:
            problem = self._sent(path)
            if problem:
                self._say(f"checkpoint {path.name}: {problem}")

        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def _sent(self, path: Path) -> str:
        assert self._sending is not None
        try:
            problem = self._sending.send(path)
        except Exception as error:
            problem = _reason(error)
        return f"it is in {path}, but was not sent: {problem}" if problem else ""

    def _next_serial(self) -> int:
        there = self._sending.next_serial() if self._sending is not None else 1
        return max(folders.next_serial(self.folder), there)

    def _superseded(self, saved: list[tuple[int, int]]) -> set[int]:
        """Return which steps may go from the URL: by the same rule as from the folder."""
        best = folders.named(self.folder / folders.BEST) if self.settings.keep_best else ""
        return folders.superseded(
            saved,
            keep_last=self.settings.keep_last,
            keep_every=self.settings.keep_every,
            best=folders.step_of(best),
        )

    def _finish(self, partial: Path, order: _Order, parts: list[StoredPart]) -> None:
        """Complete a folder in which all ranks' files are; on rank 0."""
        write_metadata(partial, parts, order.expected)
        for name, text in order.texts.items():
            folders.write_flushed(partial / name, text)
        if self._model_folder is not None:
            copy_model_files(self._model_folder, partial / MODEL_FOLDER)
        written = {
            path.relative_to(partial).as_posix(): saved_file(path)
            for path in sorted(partial.rglob("*"))
            if path.is_file()
        }
        manifest = replace(order.manifest, files=written, serial=self._next_serial())
        folders.write_flushed(partial / MANIFEST, manifest_text(manifest))
        self._may_publish()
        folders.publish(partial)
        self._restore.damaged.discard(folders.folder_name(manifest.progress.step))
        folders.retire(
            self.folder,
            keep_last=self.settings.keep_last,
            keep_every=self.settings.keep_every,
            keep_best=self.settings.keep_best,
            besides=self._restore.damaged,
        )

    # --- loading ---------------------------------------------------------------------------

    def load(self, engine: Engine, which: folders.Which = folders.LATEST) -> Progress:
        """Fill an engine with a checkpoint of any plan; every rank calls this.

        `which` is "latest", a step, a name or a path. If the latest is damaged, the one before it
        is taken, and so on. Afterwards the masters are what was saved: `take_masters` must not be
        called.
        """
        self.wait()
        files, manifest = self._restore.load(engine, which)
        asked_for = self._together.rank == 0 and str(which) != folders.LATEST
        if asked_for and isinstance(files, FolderFiles):
            if files.folder.parent == self.folder.resolve():
                folders.make_latest(files.folder)
        elif asked_for and self._sending is not None:
            self._sending.make_latest(files.name, self._next_serial())
        if not restore_random_state(engine.accelerator, manifest.random):
            self._say(f"checkpoint {files.name}: its random state is of another kind of chip")
        engine.step_number = manifest.updates
        engine.scaling.load_state_dict(manifest.progress.loss_scale)
        return manifest.progress


def _attempt(work: Callable[[], object]) -> str:
    """Do something; return why it failed, in one line, or nothing."""
    try:
        work()
    except Exception as error:
        return _reason(error)
    return ""


def _reason(error: Exception) -> str:
    if isinstance(error, TuttiError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
