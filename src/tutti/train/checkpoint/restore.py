"""How ranks find a checkpoint together and fill their engines from it.

Those in the run's folder and those under its URL are one list, the newest first: what the folder
has is taken from there. A damaged one is passed over for the one before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tutti.document import Place, build
from tutti.errors import DamagedError, InputError, TuttiError
from tutti.train.checkpoint import folders
from tutti.train.checkpoint.coordinator import Coordinator
from tutti.train.checkpoint.loading import Missing, fill_state, prepare_state
from tutti.train.checkpoint.manifest import Manifest, check_model
from tutti.train.checkpoint.places import CheckpointFiles, FolderFiles, UrlFiles
from tutti.train.checkpoint.remote import RemoteCheckpoint, RemoteRun
from tutti.train.checkpoint.sharing import SharedReads

if TYPE_CHECKING:
    from tutti.train.engine.engine import Engine

Reading = Literal["auto", "each", "broadcast"]
"""Who reads a checkpoint: every rank what it needs, or one and it hands it on; "auto" lets ranks
hand on what comes from a URL."""


class _Problem(NamedTuple):
    """Why a checkpoint could not be loaded; as plain values, for another rank."""

    text: str = ""
    kind: str = ""

    @classmethod
    def of(cls, error: TuttiError) -> _Problem:
        return cls(str(error), type(error).__name__)

    @property
    def error(self) -> TuttiError:
        known = {"DamagedError": DamagedError, "InputError": InputError}
        return known.get(self.kind, TuttiError)(self.text)


class Restore:
    """Loads the checkpoints of one run, on one rank."""

    def __init__(
        self,
        folder: Path,
        remote: RemoteRun | None,
        together: Coordinator,
        say: Callable[[str], None],
        *,
        missing: Missing,
        reading: Reading,
    ) -> None:
        self._folder, self._remote, self._together, self._say = folder, remote, together, say
        self._missing, self._reading = missing, reading
        self.damaged: set[str] = set()  # found so when they were loaded
        self.read_bytes = 0  # by this rank, from the storage

    def load(self, engine: Engine, which: folders.Which) -> tuple[CheckpointFiles, Manifest]:
        """Fill an engine; every rank calls this. Return what it was filled from."""
        candidates = self._candidates(which)
        for files, others in zip(candidates, range(len(candidates) - 1, -1, -1), strict=True):
            problem = self._filled(engine, files)
            if not problem.text:
                return files, files.manifest()
            if not (problem.kind == "DamagedError" and others):
                break
            self.damaged.add(files.name)
            self._say(f"checkpoint {files.name} is not used: {problem.text}")
        raise problem.error

    # --- which -----------------------------------------------------------------------------

    def _candidates(self, which: folders.Which) -> list[CheckpointFiles]:
        """Return the checkpoints to try, which rank 0 looks for."""
        problem, candidates = _Problem(), list[Any]()
        if self._together.rank == 0:
            try:
                candidates = self._looked_for(which)
            except TuttiError as error:
                problem = _Problem.of(error)
        problem, candidates = self._together.broadcast((problem, candidates))
        problem = _Problem(*problem)
        if problem.text:
            raise problem.error
        return [self._opened(value) for value in candidates]

    def _looked_for(self, which: folders.Which) -> list[Any]:
        """Return paths and entries of the index as plain values, the newest first."""
        if self._remote is None:
            return [str(path.resolve()) for path in folders.resolve(self._folder, which, self._say)]
        there = self._remote.resolve(which)
        try:
            here = folders.resolve(self._folder, which, self._say)
        except InputError:
            if not there:
                raise
            here = []
        held = {path.name: FolderFiles(path).manifest().serial for path in here}
        pairs: list[tuple[int, int, Any]] = [
            (-held[path.name], 0, str(path.resolve())) for path in here
        ]
        pairs += [
            (-entry.serial, 1, asdict(entry))
            for entry in there
            if held.get(entry.name) != entry.serial
        ]
        return [value for *_, value in sorted(pairs, key=lambda pair: pair[:2])]

    def _opened(self, value: Any) -> CheckpointFiles:
        if isinstance(value, str):
            return FolderFiles(Path(value))
        assert self._remote is not None
        return UrlFiles(self._remote, build(RemoteCheckpoint, value, Place("checkpoints.json")))

    # --- filling ---------------------------------------------------------------------------

    def _filled(self, engine: Engine, files: CheckpointFiles) -> _Problem:
        """Load a checkpoint; return the first rank's problem, if any."""
        shared = self._shared(files)
        problem, notes = _Problem(), list[str]()
        try:
            damage = files.damage() if self._together.rank == 0 else None
            if damage is not None:
                raise DamagedError(damage)
            manifest = files.manifest()
            check_model(files.place, manifest, engine.spec)
            wanted = prepare_state(engine, files, manifest, self._missing)
            notes = wanted.notes
        except TuttiError as error:
            problem = _Problem.of(error)
        if shared is not None:  # nobody waits for the chunks of one who will not read
            problem = self._first(problem)
        if not problem.text:
            try:
                self.read_bytes += fill_state(engine, files, wanted, shared)
            except TuttiError as error:
                problem = _Problem.of(error)
        elif shared is not None:
            return problem
        problem = self._first(problem)
        for note in notes if not problem.text else ():
            self._say(note)
        return problem

    def _shared(self, files: CheckpointFiles) -> SharedReads | None:
        """Return how ranks read for each other; None if each reads for itself."""
        wanted = self._reading == "broadcast" or (
            self._reading == "auto" and isinstance(files, UrlFiles)
        )
        comm = getattr(self._together, "communicator", None)
        return SharedReads(comm) if wanted and comm is not None and comm.size > 1 else None

    def _first(self, problem: _Problem) -> _Problem:
        problems = self._together.gather(problem) or []
        first = next((each for each in problems if each[0]), _Problem())
        return _Problem(*self._together.broadcast(tuple(first)))
