"""Parquet files, and the Arrow files of Hugging Face's `Dataset.save_to_disk`, through pyarrow.

The `datasets` library is not needed: a saved dataset is `state.json`, which names Arrow streams in
order; several splits are folders beside `dataset_dict.json`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tutti.errors import InputError, hint
from tutti.optional_imports import library
from tutti.train.data.sources.piece import PIECE_BYTES, FilePiece, Record


class ParquetReader:
    """Reads .parquet files by row groups."""

    def pieces(self, file: Path) -> list[FilePiece]:
        """Return each row group."""
        groups = _parquet(str(file)).metadata
        return [
            FilePiece(
                file=str(file), start=i, stop=i + 1,
                num_bytes=groups.row_group(i).total_byte_size,
            )
            for i in range(groups.num_row_groups)
        ]  # fmt: skip

    def fields(self, file: Path) -> list[str]:
        """Return the columns."""
        return list(_parquet(str(file)).schema_arrow.names)

    def records(self, piece: FilePiece, fields: Sequence[str]) -> Iterator[Record]:
        """Return the rows of the groups, with the wanted columns alone."""
        file = _parquet(piece.file)
        known = [name for name in fields if name in file.schema_arrow.names]
        groups = file.metadata
        for group in range(piece.start, piece.stop):
            first = sum(groups.row_group(i).num_rows for i in range(group))
            try:
                batches = file.iter_batches(4096, row_groups=[group], columns=known)
                for batch in batches:
                    yield from _rows(batch, piece.file, first)
                    first += batch.num_rows
            except (OSError, ValueError) as error:
                raise _damaged(piece.file, error) from None


class DatasetReader:
    """Reads the .arrow files of a saved dataset by record batches."""

    def pieces(self, file: Path) -> list[FilePiece]:
        """Return runs of record batches of about PIECE_BYTES."""
        pieces: list[FilePiece] = []
        start, num_bytes, index = 0, 0, 0
        for index, batch in enumerate(_batches(str(file)), 1):
            num_bytes += batch.nbytes
            if num_bytes >= PIECE_BYTES:
                pieces.append(
                    FilePiece(file=str(file), start=start, stop=index, num_bytes=num_bytes)
                )
                start, num_bytes = index, 0
        if index > start:
            pieces.append(FilePiece(file=str(file), start=start, stop=index, num_bytes=num_bytes))
        return pieces

    def fields(self, file: Path) -> list[str]:
        """Return the columns."""
        return list(_stream(str(file)).schema.names)

    def records(self, piece: FilePiece, fields: Sequence[str]) -> Iterator[Record]:
        """Return the rows of the batches, with the wanted columns alone."""
        first = 0
        for index, batch in enumerate(_batches(piece.file)):
            if index >= piece.stop:
                break
            if index >= piece.start:
                known = [name for name in fields if name in batch.schema.names]
                yield from _rows(batch.select(known), piece.file, first)
            first += batch.num_rows


def _rows(batch: Any, file: str, first: int) -> Iterator[Record]:
    for number, row in enumerate(batch.to_pylist(), first):
        yield Record(row, lambda number=number: f"{file}: row {number}")  # type: ignore[misc]


def _damaged(file: str, error: Exception) -> InputError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return InputError(f"{file}: cannot be read ({reason})")


@functools.lru_cache(maxsize=8)
def _parquet(file: str) -> Any:
    parquet = library("pyarrow.parquet", file)
    try:
        return parquet.ParquetFile(file)
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these
        raise _damaged(file, error) from None


def _stream(file: str) -> Any:
    arrow = library("pyarrow", file)
    library("pyarrow.ipc", file)
    try:
        return arrow.ipc.open_stream(arrow.memory_map(file))
    except (OSError, ValueError) as error:
        raise _damaged(file, error) from None


def _batches(file: str) -> Iterator[Any]:
    try:
        yield from _stream(file)
    except (OSError, ValueError) as error:
        raise _damaged(file, error) from None


def is_dataset(folder: Path) -> bool:
    """Tell whether `save_to_disk` wrote the folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def dataset_files(folder: Path, split: str) -> list[Path]:
    """Return the Arrow files of a saved dataset, in order."""
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits", [])
        wanted = split or (splits[0] if len(splits) == 1 else "")
        if wanted not in splits:
            if not wanted:
                raise InputError(f"{folder}: has the splits {', '.join(splits)}; choose 'split'")
            raise InputError(f"{folder}: has no split '{wanted}'; {hint(wanted, splits)}")
        folder = folder / wanted
    elif split:
        raise InputError(f"{folder}: has no splits; leave 'split' out")
    state = _json(folder / "state.json")
    if state.get("_indices_files"):
        raise InputError(
            f"{folder}: rows are chosen by an index file; save it again after flatten_indices()"
        )
    try:
        return [folder / item["filename"] for item in state["_data_files"]]
    except (KeyError, TypeError):
        raise InputError(f"{folder / 'state.json'}: names no data files") from None


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(str(file), error) from None
    if not isinstance(value, dict):
        raise InputError(f"{file}: expected an object")
    return value
