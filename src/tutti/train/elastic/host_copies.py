"""Copies of a rank's state in its host's memory, which outlive the rank.

Two take turns: while one is written, the other is whole. Where partners on other hosts get them
too, three do, and none is written before they have the last: whichever host is lost, there is a
step of which some other has each copy. A copy is taken beside the forward and backward of the next
step, which change nothing of it, and is over before the update. Its label is written last, so that
a copy without one was cut off.

Where the device can copy to pinned memory, the copies' memory is pinned once and filled on a lane
of its own, so that the step's work does not wait for it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tutti.accelerator import Accelerator
from tutti.elastic.partner_copies import ARRIVED, KEPT, OWN
from tutti.errors import InputError
from tutti.files import write_text
from tutti.ownership.rectangles import Rectangle
from tutti.train.checkpoint.contents import KeptPieces, Piece, StateKind
from tutti.train.checkpoint.manifest import Progress
from tutti.train.elastic.held_state import Facts, HeldState

if TYPE_CHECKING:
    from tutti.train.engine.engine import Engine

TURNS, TURNS_WITH_PARTNERS = 2, 3
ARRIVE_S = 3.0  # a partner that takes longer is waited for no more
_ALIGNED = 64


class Room:
    """Memory of one copy, shared with the host; pinned where the device can."""

    def __init__(self, path: Path, size: int, accelerator: Accelerator) -> None:
        with open(path, "w+b") as file:
            file.truncate(max(size, 1))
            self.memory = mmap.mmap(file.fileno(), max(size, 1))
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._accelerator, self.is_pinned = accelerator, accelerator.pin(self.bytes)

    def close(self) -> None:
        """Let go of it; a copy in it stays in its file."""
        if self.is_pinned:
            self._accelerator.unpin(self.bytes)
            self.is_pinned = False


class HostCopies:
    """The copies of one chip, as its rank writes them."""

    def __init__(
        self,
        folder: Path,
        chip: str,
        generation: int,
        *,
        every: int = 1,
        partners: bool = False,
        gone: Callable[[], bool] = lambda: False,
        rooms: dict[int, Room] | None = None,
    ) -> None:
        """Write into a folder; `gone` tells that the generation is over, so nobody waits.

        `rooms` are those of this process in the generation before.
        """
        self._folder, self._chip, self._generation = folder, chip, generation
        self._partners, self._gone = partners, gone
        self._turns, self._every = TURNS_WITH_PARTNERS if partners else TURNS, every
        self._last: tuple[int, int] | None = None  # turn and step of the newest
        self.late = 0  # copies that no partner had in time
        self.rooms = {} if rooms is None else rooms
        self._pieces: KeptPieces | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._labels = {
            path: (generation, step)
            for own, generation, step, path in labelled(folder)
            if own == chip
        }

    def take(self, engine: Engine, progress: Progress) -> None:
        """Begin to copy the state after a step; `wait` before it changes."""
        self.wait()
        if self._partners and self._last is not None and not self._arrived(*self._last):
            self.late += 1
        self._pieces = self._pieces or KeptPieces(engine)
        pieces = [piece for piece in self._pieces.now() if not piece.copy]
        facts, turn = Facts.of(engine, progress), progress.step // self._every % self._turns
        self._last = (turn, progress.step)
        accelerator, updated = engine.accelerator, engine.accelerator.event()
        updated.record()

        def copy() -> None:
            try:
                with accelerator.lane("host copies"):
                    updated.wait()
                    self._write(accelerator, turn, pieces, facts)
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=copy, name="host-copy", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the copy under way."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise InputError(
                f"a copy in the host's memory failed ({failure}); leave elastic.copies out, or "
                "copy less often"
            )

    def forget_engine(self) -> None:
        """Let the engine go whose state was copied; the memory of the copies stays."""
        self._pieces = None

    def _arrived(self, turn: int, step: int) -> bool:
        """Wait for the partners to have a copy; False where they do not get it in time."""
        mark = label_path(self._folder, self._chip, turn).with_suffix(ARRIVED)
        wanted, until = f"{self._generation} {step}\n", time.monotonic() + ARRIVE_S
        while time.monotonic() < until and not self._gone():
            with contextlib.suppress(OSError):
                if mark.read_text(encoding="ascii") == wanted:
                    return True
            time.sleep(0.002)
        return False

    @torch.no_grad()
    def _write(
        self, accelerator: Accelerator, turn: int, pieces: Sequence[Piece], facts: Facts
    ) -> None:
        label, data = label_path(self._folder, self._chip, turn), self._data(turn)
        label.unlink(missing_ok=True)
        self._labels = {path: copy for path, copy in self._labels.items() if path != label}
        written, at = list[dict[str, Any]](), 0
        total = sum(_padded(p.memory.numel() * p.memory.element_size()) for p in pieces)
        room = self._room(turn, data, total, accelerator)
        for piece in pieces:
            size = piece.memory.numel() * piece.memory.element_size()
            target = room.bytes[at : at + size].view(piece.memory.dtype).view(piece.memory.shape)
            accelerator.to_host(piece.memory.detach(), into=target)
            written.append({
                "name": piece.name, "kind": piece.kind.value, "shape": list(piece.shape),
                "offsets": list(piece.rectangle.offsets), "sizes": list(piece.rectangle.sizes),
                "dtype": str(piece.memory.dtype).removeprefix("torch."), "at": at,
            })  # fmt: skip
            at += _padded(size)
        copied = accelerator.event()
        copied.record()
        copied.synchronize()
        words = {"chip": self._chip, "generation": self._generation, "facts": facts.to_words()}
        write_text(label, json.dumps({**words, "pieces": written}))
        self._labels = {**self._labels, label: (self._generation, facts.progress.step)}

    @property
    def whole(self) -> list[tuple[int, int]]:
        """Generation and step of the chip's copies that are whole."""
        return sorted(self._labels.values())

    def _data(self, turn: int) -> Path:
        return self._folder / f"copy-{self._chip.replace('/', '-')}-{turn}"

    def _room(self, turn: int, path: Path, size: int, accelerator: Accelerator) -> Room:
        """Return memory that is used again by later copies: fresh memory costs as much."""
        kept = self.rooms.get(turn)
        if kept is None or len(kept.memory) != max(size, 1):
            if kept is not None:
                kept.close()
            kept = self.rooms[turn] = Room(path, size, accelerator)
        return kept


def label_path(folder: Path, chip: str, turn: int) -> Path:
    """Return where a copy's label is."""
    return folder / f"copy-{chip.replace('/', '-')}-{turn}.json"


def labelled(folder: Path) -> list[tuple[str, int, int, Path]]:
    """Return the whole copies on this host: chip, generation, step, label."""
    return _labelled(folder, OWN)


def kept_for_others(folder: Path) -> list[tuple[str, int, int, Path]]:
    """Return the whole copies on this host of chips of other hosts."""
    return _labelled(folder, KEPT)


def _labelled(folder: Path, prefix: str) -> list[tuple[str, int, int, Path]]:
    labels = list[tuple[str, int, int, Path]]()
    for label in sorted(folder.glob(f"{prefix}*.json")):
        try:
            words = json.loads(label.read_text(encoding="utf-8"))
        except FileNotFoundError:  # a newer one is being written
            continue
        step = int(words["facts"]["progress"]["step"])
        labels.append((words["chip"], words["generation"], step, label))
    return labels


def read_copy(label: Path) -> HeldState:
    """Return a copy by its label."""
    written = json.loads(label.read_text(encoding="utf-8"))
    with open(label.with_suffix(""), "r+b") as file:
        data = mmap.mmap(file.fileno(), 0)
    facts = Facts.from_words(written["facts"])
    return HeldState(facts=facts, pieces=tuple(_piece(data, p) for p in written["pieces"]))


def _piece(data: mmap.mmap, words: dict[str, Any]) -> Piece:
    dtype, sizes = getattr(torch, words["dtype"]), tuple(words["sizes"])
    rectangle = Rectangle(tuple(words["offsets"]), sizes)
    memory = torch.frombuffer(data, dtype=dtype, count=rectangle.count, offset=words["at"])
    return Piece(
        name=words["name"],
        kind=StateKind(words["kind"]),
        shape=tuple(words["shape"]),
        rectangle=rectangle,
        memory=memory.view(sizes),
    )


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
