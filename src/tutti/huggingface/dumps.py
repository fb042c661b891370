"""Dumps: what one side computed for one batch, module by module, as files.

A dump is a folder: `dump.json` says what was run and lists the tensors in the order of execution;
safetensors files hold them. Keys are "input/…", "forward/<module>" and "gradient/<parameter>"; of
a training run "step-2/loss", "step-2/gradient/<parameter>" and "step-2/weight/<parameter>".
Modules are called alike on every side: "0" is the embedding's output, "3" what block 3 hands on,
"3.attention" and "3.mlp" what its two halves give before any norm or residual that follows, the
last unit's "norm", then "logits" and "loss". Two dumps may come from two machines.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tutti.document import Count, Natural, Place, build, plain_fields, shown
from tutti.errors import InputError
from tutti.files import parse_json, pretty_json, read_text, unwritable
from tutti.huggingface.dtypes import BY_NAME, Dtype
from tutti.huggingface.tensor_file import Entry, Raw, TensorFile, header_bytes
from tutti.huggingface.workspace import partial_of, require_free
from tutti.models import ModelSpec

if TYPE_CHECKING:
    import torch

DUMP = "dump.json"
FORMAT = "tutti-dump/1"
FLUSH_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The tokens that all sides see, (sequences, length)."""

    tokens: NDArray[np.int64]
    seed: int

    @classmethod
    def seeded(cls, spec: ModelSpec, *, sequences: int, length: int, seed: int) -> Batch:
        """Draw tokens evenly from a model's vocabulary; equal on every machine."""
        if length > spec.max_length:
            raise InputError(f"--length is {length}; {spec.name} is made for {spec.max_length}")
        generator = np.random.Generator(np.random.PCG64(seed))
        return cls(tokens=generator.integers(0, spec.vocab, (sequences, length)), seed=seed)

    @property
    def sha256(self) -> str:
        """What two dumps of one batch have in common."""
        shape = ",".join(map(str, self.tokens.shape))
        return hashlib.sha256(shape.encode() + self.tokens.tobytes()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One tensor of a dump."""

    key: str
    dtype: str
    shape: tuple[Natural, ...]
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpFacts:
    """What was run."""

    side: str
    model: str
    model_type: str
    model_hash: str
    dtype: str  # of weights and computation, as torch calls it
    device: str
    sequences: Count
    length: Count
    seed: int
    batch_sha256: str
    steps: Natural = 0  # of training, each on `sequences`; 0: one batch, forward and backward
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    facts: DumpFacts
    tensors: tuple[Recorded, ...]


class DumpWriter:
    """Writes a dump; the folder appears when the `with` block ends well."""

    def __init__(self, target: Path, facts: DumpFacts, batch: Batch) -> None:
        require_free(target, resume=True)
        self.target, self.facts = target, facts
        self._folder = partial_of(target)
        self._recorded: list[Recorded] = []
        self._keys: set[str] = set()
        self._waiting: dict[Entry, Raw] = {}
        self._waiting_bytes = 0
        self._files = 0
        try:
            shutil.rmtree(self._folder, ignore_errors=True)  # of a run that failed
            self._folder.mkdir()
        except OSError as error:
            raise unwritable(self._folder, error) from None
        self.record_raw("input/tokens", batch.tokens.view(np.uint64), BY_NAME["int64"])

    def record(self, key: str, tensor: torch.Tensor) -> None:
        """Keep a tensor under "forward/<module>" or "gradient/<parameter>"."""
        from tutti.huggingface.tensors import to_raw

        dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
        self.record_raw(key, to_raw(tensor, dtype).copy(), dtype)

    def record_raw(self, key: str, raw: Raw, dtype: Dtype) -> None:
        """Keep bytes."""
        if key in self._keys:
            raise ValueError(f"'{key}' was recorded already")
        self._keys.add(key)
        recorded = Recorded(key=key, dtype=dtype.name, shape=tuple(raw.shape), file=self._file)
        self._recorded.append(recorded)
        start = self._waiting_bytes
        self._waiting_bytes += raw.nbytes
        entry = Entry(
            key=key, dtype=dtype, shape=recorded.shape, start=start, stop=self._waiting_bytes
        )
        self._waiting[entry] = raw
        if self._waiting_bytes >= FLUSH_BYTES:
            self._flush()

    @property
    def _file(self) -> str:
        return f"tensors-{self._files}.safetensors"

    def _flush(self) -> None:
        if not self._waiting:
            return
        with (self._folder / self._file).open("wb") as stream:
            stream.write(header_bytes({entry.key: entry for entry in self._waiting}, {}))
            for raw in self._waiting.values():
                stream.write(np.ascontiguousarray(raw).tobytes())
        self._waiting.clear()
        self._waiting_bytes = 0
        self._files += 1

    def __enter__(self) -> DumpWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        try:
            self._flush()
            value = plain_fields(_File(facts=self.facts, tensors=tuple(self._recorded)))
            (self._folder / DUMP).write_text(pretty_json({"format": FORMAT, **value}) + "\n")
            self._folder.rename(self.target)
        except OSError as failure:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise unwritable(self.target, failure) from None


class Dump:
    """A dump, open for reading."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / DUMP).is_file():
            raise InputError(f"{folder}: holds no {DUMP}; write one with 'tutti align dump'")
        path = folder / DUMP
        value = parse_json(read_text(path), str(path))
        place = Place(str(path))
        fields = dict(value) if isinstance(value, dict) else {}
        if fields.pop("format", None) != FORMAT:
            raise place.error(f"not a dump: 'format' is not {shown(FORMAT)}")
        file = build(_File, fields, place)
        self.facts = file.facts
        self.tensors: dict[str, Recorded] = {recorded.key: recorded for recorded in file.tensors}
        self._files: dict[str, TensorFile] = {}

    def numbers(self, key: str) -> NDArray[np.float64]:
        """Return a tensor in double precision, flat."""
        recorded = self.tensors[key]
        if recorded.file not in self._files:
            self._files[recorded.file] = TensorFile(self.folder / recorded.file)
        file = self._files[recorded.file]
        entry = file.entries.get(key)
        if entry is None or entry.shape != recorded.shape or entry.dtype.name != recorded.dtype:
            what = "nothing" if entry is None else f"{entry.dtype.name} {list(entry.shape)}"
            raise InputError(
                f"{file.path}: '{key}': expected {recorded.dtype} {list(recorded.shape)}, found "
                f"{what}"
            )
        return _numbers(file.array(key).reshape(-1), entry.dtype)


def _numbers(raw: Raw, dtype: Dtype) -> NDArray[np.float64]:
    if dtype.name == "bfloat16":  # the upper half of a float32
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype.name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8"):
        return raw.view(dtype.name).astype(np.float64)
    raise InputError(f"a dump cannot hold {dtype.name}")
