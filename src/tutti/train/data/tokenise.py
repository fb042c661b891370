"""Tokenising the pieces of a source, in this process or in several.

Workers are plain Python processes (`worker`) that take one piece per line and answer with one
line each: they need no guarded main module, and inherit nothing of the training process.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti.document import plain
from tutti.errors import InputError
from tutti.huggingface.tokenizer import Tokenizer
from tutti.train.data.config import SourceKind
from tutti.train.data.encode import encode
from tutti.train.data.forms import Shape
from tutti.train.data.sources.piece import FilePiece
from tutti.train.data.store import write_part

LARGE_BYTES = 64 << 20  # input that is worth starting processes for

BytesDone = Callable[[float, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What all pieces of a source have in common."""

    kind: SourceKind
    shape: Shape
    tokenizer: str
    blocks: bool
    end: bool
    folder: str  # where parts are written
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One piece, and the number of the part that it becomes."""

    number: int
    piece: FilePiece


def tokenise(
    work: Work,
    pieces: Sequence[FilePiece],
    tokenizer: Tokenizer,
    *,
    processes: int,
    progress: BytesDone,
) -> None:
    """Write a part for every piece."""
    whole = sum(piece.num_bytes for piece in pieces)
    if not processes:
        processes = len(os.sched_getaffinity(0)) if whole >= LARGE_BYTES else 1
    processes = min(processes, len(pieces))
    tasks = [Task(number=number, piece=piece) for number, piece in enumerate(pieces)]
    done = 0
    progress(0, whole)
    if processes > 1:
        for task in _in_processes(work, tasks, processes):
            done += task.piece.num_bytes
            progress(done, whole)
        return
    for task in tasks:
        do_task(work, task, tokenizer)
        done += task.piece.num_bytes
        progress(done, whole)


def do_task(work: Work, task: Task, tokenizer: Tokenizer) -> None:
    """Write the part of one piece."""
    encoded = encode(task.piece, work.kind, work.shape, tokenizer, blocks=work.blocks, end=work.end)
    write_part(Path(work.folder), task.number, encoded, work.dtype)


# --- several processes -----------------------------------------------------------------------


class _Worker:
    """A process of `worker` that does one task after the other."""

    def __init__(self, work: Work) -> None:
        alone = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tutti.train.data.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
            env={**os.environ, **alone},
        )  # fmt: skip
        self._unsaid: list[Work] = [work]

    def _say(self, value: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(plain(value)) + "\n")
        self._process.stdin.flush()

    def do(self, task: Task) -> None:
        """Have a task done, or raise what the worker found wrong."""
        assert self._process.stdout is not None
        try:
            while self._unsaid:
                self._say(self._unsaid.pop())
            self._say(task)
            answer = self._process.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            code = self._process.wait()
            raise InputError(
                f"{task.piece.file}: the process that tokenised it ended with {code}; "
                f"with 'processes: 1' its error is seen, and less memory is used"
            )
        error = json.loads(answer)
        if error.get("errno"):
            raise OSError(error["errno"], error["message"])
        if error:
            raise InputError(error["message"])

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _in_processes(work: Work, tasks: Sequence[Task], processes: int) -> Iterator[Task]:
    """Return the tasks in the order in which workers finish them."""
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    finished: queue.SimpleQueue[Task | BaseException] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)

    def drive(worker: _Worker) -> None:
        try:
            while True:
                task = waiting.get_nowait()
                worker.do(task)
                finished.put(task)
        except queue.Empty:
            pass
        except BaseException as error:
            finished.put(error)

    workers = [_Worker(work) for _ in range(processes)]
    threads = [threading.Thread(target=drive, args=(w,), daemon=True) for w in workers]
    try:
        for thread in threads:
            thread.start()
        for _ in tasks:
            item = finished.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        for worker in workers:
            worker.stop()
        for thread in threads:
            thread.join()
