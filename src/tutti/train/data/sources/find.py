"""Which files a source names, and of which kind they are."""

from __future__ import annotations

import functools
import glob
import os
from collections.abc import Iterable
from pathlib import Path

from tutti.errors import InputError, hint
from tutti.files import meant_instead
from tutti.storage.url import is_url
from tutti.train.data.config import SHIPPED, SourceConfig, SourceKind
from tutti.train.data.sources.array import JsonArrayReader
from tutti.train.data.sources.arrow import (
    DatasetReader,
    ParquetReader,
    dataset_files,
    is_dataset,
)
from tutti.train.data.sources.jsonl import JsonLinesReader
from tutti.train.data.sources.piece import Reader
from tutti.train.data.sources.plain_text import TextReader

ENDINGS: dict[str, SourceKind] = {
    ".txt": SourceKind.TEXT,
    ".md": SourceKind.TEXT,
    ".jsonl": SourceKind.JSONL,
    ".ndjson": SourceKind.JSONL,
    ".json": SourceKind.JSON,
    ".parquet": SourceKind.PARQUET,
    ".bin": SourceKind.MEGATRON,
    ".idx": SourceKind.MEGATRON,
}
_TEXTS = Path(__file__).parents[1] / "text"


def shipped_texts() -> list[str]:
    """Return the names of the texts that come with tutti."""
    return sorted(path.stem for path in _TEXTS.glob("*.txt"))


def find(source: SourceConfig, folder: Path) -> tuple[SourceKind, list[Path]]:
    """Return a source's kind and its files in a fixed order."""
    if source.path.startswith(SHIPPED):
        name = source.path.removeprefix(SHIPPED)
        if name not in shipped_texts():
            raise InputError(f"{source.path}: no such text; {hint(name, shipped_texts())}")
        return SourceKind.TEXT, [_TEXTS / f"{name}.txt"]
    if is_url(source.path):
        raise InputError(f"{source.path}: is at a URL, and was not fetched")
    path = folder / Path(source.path).expanduser()
    if _is_megatron(source.kind, path):
        return SourceKind.MEGATRON, [
            path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        ]
    if path.is_dir() and (source.kind is SourceKind.DATASET or is_dataset(path)):
        return SourceKind.DATASET, dataset_files(path, source.split)
    files = _expanded(path, source)
    kinds = {file: _kind(file) for file in files} if source.kind is SourceKind.AUTO else {}
    unknown = [file for file, kind in kinds.items() if kind is None]
    if unknown:
        raise InputError(
            f"{unknown[0]}: of no known kind (known endings: {', '.join(sorted(ENDINGS))}); "
            f"say 'kind'"
        )
    kinds_here = {kind for kind in kinds.values() if kind is not None} or {source.kind}
    if len(kinds_here) > 1:
        raise InputError(
            f"{source.path}: has files of several kinds ({', '.join(sorted(kinds_here))}); "
            f"name them as sources of their own"
        )
    return kinds_here.pop(), files


def _is_megatron(kind: SourceKind, path: Path) -> bool:
    if kind is not SourceKind.AUTO:
        return kind is SourceKind.MEGATRON
    pair = path.suffix in (".bin", ".idx") and "*" not in path.name
    return pair or (not path.exists() and Path(f"{path}.idx").is_file())


def kind_of(name: str) -> SourceKind | None:
    """Return the kind that a file's ending says; None where it says nothing."""
    return _kind(Path(name))


def _kind(file: Path) -> SourceKind | None:
    return ENDINGS.get(file.suffix.lower())


def _expanded(path: Path, source: SourceConfig) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = (
            Path(parent) / name for parent, _, names in os.walk(path, onerror=_refused)
            for name in names
        )  # fmt: skip
        wanted = {source.kind} if source.kind is not SourceKind.AUTO else set(ENDINGS.values())
        files = [file for file in inside if _kind(file) in wanted and not file.name.startswith(".")]
        if not files:
            raise InputError(f"{path}: the folder has no files to read ({_endings(wanted)})")
        # Beside files of another kind a .json describes them.
        data = [file for file in files if _kind(file) is not SourceKind.JSON]
        return sorted(data or files)
    files = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]
    if files:
        return sorted(files)
    if glob.has_magic(str(path)):
        raise InputError(f"{path}: no file matches")
    raise InputError(f"{path}: no such file or folder{meant_instead(path, folders=True)}")


def _refused(error: OSError) -> None:
    raise InputError(f"{error.filename}: cannot be read ({error.strerror})")


def _endings(kinds: Iterable[SourceKind]) -> str:
    return ", ".join(sorted(ending for ending, kind in ENDINGS.items() if kind in kinds))


@functools.cache
def reader_of(kind: SourceKind, *, blocks: bool) -> Reader:
    """Return the reader of a kind of file."""
    readers: dict[SourceKind, Reader] = {
        SourceKind.TEXT: TextReader(blocks=blocks),
        SourceKind.JSONL: JsonLinesReader(),
        SourceKind.JSON: JsonArrayReader(),
        SourceKind.PARQUET: ParquetReader(),
        SourceKind.DATASET: DatasetReader(),
    }
    return readers[kind]
