"""Tokenise once: a store per source, found again by what went into it.

The key is made of the files (their content where small, else path, size and time of change), the
tokenizer and the options that matter. A store is written beside its place and renamed when it is
whole. Of several processes that want the same store one builds it, under a lock that the system
drops when the process ends; the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tutti.errors import InputError
from tutti.files import fingerprint
from tutti.huggingface.tokenizer import Tokenizer
from tutti.train.data.config import Form, SourceConfig, SourceKind
from tutti.train.data.encode import shape_of
from tutti.train.data.forms import Shape
from tutti.train.data.sources.find import find, reader_of
from tutti.train.data.sources.piece import FilePiece, unreadable
from tutti.train.data.store import FORMAT, StoreFacts, TokenStore, join, remove_folder
from tutti.train.data.tokenise import Work, tokenise

Progress = Callable[[str, float, float], None]  # what is being done, how much of it, of how much

_SMALL_BYTES = 1 << 20
_WAIT_S = 0.2


def silent(what: str, done: float, whole: float) -> None:
    """Show no progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """Where stores lie and how they are made."""

    folder: Path
    end_of_document: bool = True
    processes: int = 0  # 0: as many as the input needs
    progress: Progress = silent


def default_folder() -> Path:
    """Return the folder of the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "tutti" / "data"


def open_store(
    source: SourceConfig, tokenizer: Tokenizer, settings: CacheSettings, *, base: Path = Path()
) -> TokenStore:
    """Return the tokens of a source, tokenised now or earlier."""
    kind, files = find(source, base)
    try:
        shape = shape_of(source, kind, files)
        key = _key(source, kind, files, shape, tokenizer, settings)
        place = settings.folder / key
        if not (place / "store.json").is_file():
            with _locked(place, source.name, settings.progress) as owner:
                if owner and not (place / "store.json").is_file():
                    _build(source, kind, files, shape, tokenizer, settings, place)
    except OSError as error:
        raise unreadable(error.filename or source.name, error) from None
    return TokenStore.open(place, source.name)


def _key(
    source: SourceConfig,
    kind: SourceKind,
    files: list[Path],
    shape: Shape,
    tokenizer: Tokenizer,
    settings: CacheSettings,
) -> str:
    return fingerprint(
        {
            "format": FORMAT,
            "files": [_identity(file) for file in files],
            "kind": kind.value,
            "shape": asdict(shape),
            "blocks": source.in_blocks,
            "tokenizer": tokenizer.digest,
            "end": settings.end_of_document,
        }
    )


def _identity(file: Path) -> list[object]:
    about = file.stat()
    if about.st_size <= _SMALL_BYTES:
        return [file.name, hashlib.sha256(file.read_bytes()).hexdigest()]
    return [str(file.resolve()), about.st_size, about.st_mtime_ns]


@contextlib.contextmanager
def _locked(place: Path, name: str, progress: Progress) -> Iterator[bool]:
    """Hold the right to build a store; give False where another process built it meanwhile."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(f"{place}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise InputError(
            f"{place.parent}: tokens cannot be cached here ({error.strerror}); "
            f"choose another folder with 'cache'"
        ) from None
    began = time.monotonic()
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - began
                progress(f"{name}: another process tokenises it ({waited:.0f} s)", 0, 1)
                time.sleep(_WAIT_S)
        yield not (place / "store.json").is_file()
    finally:
        os.close(handle)


def _build(
    source: SourceConfig,
    kind: SourceKind,
    files: list[Path],
    shape: Shape,
    tokenizer: Tokenizer,
    settings: CacheSettings,
    place: Path,
) -> None:
    """Write a store beside its place, then rename it."""
    for old in place.parent.glob(f".{place.name}.*"):  # of a process that was killed
        remove_folder(old)
    temporary = place.parent / f".{place.name}.{os.getpid()}"
    pieces: list[FilePiece] = []
    reader = reader_of(kind, blocks=source.in_blocks)
    for file in files:
        pieces += reader.pieces(file)
    small = tokenizer.size <= 1 << 16  # of given tokens it says nothing
    work = Work(
        kind=kind,
        shape=shape,
        tokenizer=tokenizer.name,
        blocks=source.in_blocks,
        end=settings.end_of_document,
        folder=str(temporary),
        dtype="uint16" if small and shape.form is not Form.TOKENS else "uint32",
    )

    def shown(done: float, whole: float) -> None:
        settings.progress(f"tokenising {source.name}", done, whole)

    try:
        temporary.mkdir()
        tokenise(work, pieces, tokenizer, processes=settings.processes, progress=shown)
        facts = join(
            temporary,
            len(pieces),
            work.dtype,
            supervised=shape.form is not Form.TEXT,
            weighted=bool(shape.weight) or shape.documents > 1,
            margins=bool(shape.margin),
            group=shape.documents,
        )
        if not facts.tokens:
            raise InputError(f"{source.name}: holds no text to train on{_lacking(shape, facts)}")
        temporary.rename(place)
    except OSError as error:
        raise InputError(
            f"{place.parent}: tokens of {source.name} cannot be cached "
            f"({error.strerror or error}); make room or choose another folder with 'cache'"
        ) from None
    finally:
        remove_folder(temporary)


def _lacking(shape: Shape, facts: StoreFacts) -> str:
    """Say what all records of a source lack."""
    if not facts.skipped:
        return ""
    if shape.form is Form.CHAT:
        return (
            f": none of {facts.skipped} conversations has an assistant's turn with a token to "
            "predict; see them with `tutti data show`"
        )
    return f" ({facts.skipped} without text or loss)"
