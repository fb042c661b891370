"""`tutti.json`: what a tutti folder holds, with a checksum of every file.

A folder is a few safetensors files, which hold our tensors under our names, whole or cut along one
dimension, beside the Hugging Face files that are no weights, as they were. The manifest also keeps
which keys stood in which Hugging Face file, so that the way back yields the same files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tutti.document import Count, Natural, Place, build, plain_fields, shown
from tutti.files import parse_json, pretty_json, read_text

MANIFEST = "tutti.json"
FORMAT = "tutti-checkpoint/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A range of a tensor's `dim` and the file that holds it."""

    file: str
    start: Natural
    stop: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor: in one file, or in parts cut along `dim`."""

    dtype: str
    shape: tuple[Natural, ...]
    file: str = ""
    dim: Natural = 0
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file of the folder."""

    num_bytes: Natural
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceFile:
    """One safetensors file of the Hugging Face folder: keys in their order."""

    tensors: tuple[str, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that a tutti folder says of itself."""

    model_type: str
    model_hash: str
    parameters: Count
    files: Mapping[str, File]
    tensors: Mapping[str, Tensor]
    carried: Mapping[str, Tensor] = field(default_factory=dict)
    huggingface: Mapping[str, HuggingFaceFile] = field(default_factory=dict)


def part_key(name: str, start: int, stop: int) -> str:
    """Return the key of a part of a tensor in its file."""
    return f"{name}[{start}:{stop}]"


def manifest_text(manifest: Manifest) -> str:
    """Return the file's text."""
    return pretty_json({"format": FORMAT, **plain_fields(manifest)}) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a tutti folder."""
    path = folder / MANIFEST
    place = Place(str(path))
    value = parse_json(read_text(path), str(path))
    if not isinstance(value, dict):
        raise place.error("not a manifest: expected a mapping at the top")
    fields = dict(value)
    version = fields.pop("format", None)
    if version != FORMAT:
        raise place.error(f"'format' is {shown(version)}; this version of tutti reads '{FORMAT}'")
    manifest = build(Manifest, fields, place)
    for name in _named_files(manifest):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise place.error(f"names '{name}', which is no file of this folder")
    return manifest


def _named_files(manifest: Manifest) -> Iterator[str]:
    yield from manifest.files
    yield from manifest.huggingface
    for tensor in (*manifest.tensors.values(), *manifest.carried.values()):
        yield tensor.file
        yield from (part.file for part in tensor.parts)
