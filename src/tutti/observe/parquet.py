"""The series of a run as one Parquet file, a row per value: for notebooks and data tools."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tutti.errors import InputError
from tutti.observe.figures import label_of
from tutti.observe.folder import SERIES
from tutti.observe.rank_series import FILE
from tutti.observe.store import LEVELS, SeriesStore
from tutti.optional_imports import library

_COLUMNS = ("second", "node", "figure", "label", "mean", "least", "most")


def export_series(folder: Path, path: Path, *, level: int = 1) -> int:
    """Write all series of a run's folder; return the number of rows.

    `node` is "pool-node", empty of ranks' figures. Counters are rates. With a level of 10 or 60
    rows are of so many seconds.
    """
    if level not in LEVELS:
        raise InputError(f"series are kept by {', '.join(map(str, LEVELS))} s, not by {level} s")
    stores = sorted((folder / SERIES).glob("*.sqlite"))
    if not stores:
        raise InputError(f"{folder}: has no {SERIES}/*.sqlite to export")
    arrow, parquet = library("pyarrow", "--series"), library("pyarrow.parquet", "--series")
    text = arrow.dictionary(arrow.int32(), arrow.string())
    single = arrow.float32()
    types = (arrow.int64(), text, text, text, single, single, single)
    schema = arrow.schema(list(zip(_COLUMNS, types, strict=True)))
    part = path.with_name(f".{path.name}.part")
    rows = 0
    try:
        with parquet.ParquetWriter(part, schema) as writer:
            for store in stores:
                node = "" if store.name == FILE else store.stem
                for columns in _columns(store, node, level):
                    table = arrow.table(dict(zip(_COLUMNS, columns, strict=True)))
                    writer.write_table(table.cast(schema))
                    rows += len(columns[0])
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return rows


def _columns(path: Path, node: str, level: int) -> Iterator[tuple[Any, ...]]:
    store = SeriesStore(path, read_only=True)
    for figure in dict.fromkeys(name.partition("{")[0] for name in store.names()):
        for one in store.read(figure, 0, 1 << 40, level=level):
            count = len(one.seconds)
            if count:
                yield (one.seconds, [node] * count, [figure] * count,
                       [label_of(one.name)] * count, one.mean, one.least, one.most)  # fmt: skip
    store.close_reading()
