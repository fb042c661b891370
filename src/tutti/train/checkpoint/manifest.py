"""`tutti.json` of a checkpoint: what was saved, by which job, and how far it had come.

It is the last file that is written and names all others with their sizes, so a folder that lost one
is recognised without reading it. It has a checksum of itself and of every file but the ranks' own,
whose tensors have one each: what changed on the disk is refused by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tutti import document
from tutti.document import Count, Natural, Place, build, plain_fields, shown
from tutti.errors import DamagedError, InputError
from tutti.files import fingerprint, parse_json, pretty_json, read_text
from tutti.models.spec import ModelSpec
from tutti.plan.job import Precision

MANIFEST = "tutti.json"
PLAN = "plan.json"
MODEL_FOLDER = "model"  # config.json, tokenizer: what an export needs beside the weights
RANK_FILE = ".distcp"  # the ending of a rank's own file
FORMAT = "tutti-training/2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job has come: enough to go on at the very next sample."""

    step: Natural = 0  # batches consumed, also those whose update was skipped
    samples: Natural = 0  # sequences consumed, over all ranks
    tokens: Natural = 0
    seed: int = 0
    loss_scale: Mapping[str, float] = field(default_factory=dict)  # filled in by a save
    data: Mapping[str, object] = field(default_factory=dict)  # the data's own state, plain values
    validation_loss: float | None = None  # if it was taken after this very step


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """A generator's state, as hexadecimal bytes; `device` is the kind of chip it is of."""

    device: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """One file of a checkpoint."""

    num_bytes: Natural
    sha256: str = ""  # none of a rank's file: each of its tensors has a checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that a checkpoint says of itself."""

    progress: Progress
    updates: Natural  # of the weights: the optimizer's own step number
    serial: Count  # counts the saves of a run's folder
    saved_at: float  # seconds since 1970
    model_hash: str
    model: Mapping[str, object]  # the spec, to say what differs
    plan_hash: str
    world_size: Count
    precision: Precision
    optimizer: str
    version: str  # of tutti
    torch_version: str
    random: RandomState
    files: Mapping[str, SavedFile]  # by name, seen from the folder


def manifest_text(manifest: Manifest) -> str:
    """Return the file's text."""
    fields = json.loads(json.dumps({"format": FORMAT, **plain_fields(manifest)}))
    return pretty_json({**fields, "checksum": fingerprint(fields)}) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; name a checkpoint such as step-000100")
    if not path.is_file():
        raise InputError(f"{folder}: no checkpoint of a training run: it has no {MANIFEST}")
    return parse_manifest(read_text(path), str(path))


def parse_manifest(text: str, path: str) -> Manifest:
    """Return the manifest that a text is, which was read at a path or a URL."""
    place = Place(path)
    value = parse_json(text, path)
    if not isinstance(value, dict):
        raise place.error("not a manifest: expected a mapping at the top")
    fields = dict(value)
    version = fields.pop("format", None)
    if version != FORMAT:
        raise place.error(f"'format' is {shown(version)}; this version of tutti reads '{FORMAT}'")
    checksum = fields.pop("checksum", None)
    if checksum != fingerprint({"format": version, **fields}):
        raise DamagedError(
            f"{path}: does not match its checksum: damaged, or changed by hand; load another "
            "checkpoint"
        )
    return build(Manifest, fields, place)


def damage(folder: Path, *, thorough: bool = False) -> str | None:
    """Say in one line why a folder is no complete checkpoint; None if it is one.

    If `thorough`, every file but the ranks' own is read. Theirs are when they are loaded.
    """
    try:
        manifest = read_manifest(folder)
        for name, file in manifest.files.items():
            _check_size(folder, name, file)
            if thorough and file.sha256:
                read_checked(folder, name, manifest.files)
    except InputError as error:
        return str(error)
    return None


def _check_size(folder: Path, name: str, file: SavedFile) -> None:
    path = folder / name
    if not path.is_file():
        raise DamagedError(f"{path}: is missing")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{path}: lies outside of the checkpoint; it is not opened")
    if path.stat().st_size != file.num_bytes:
        raise DamagedError(f"{path}: expected {file.num_bytes} bytes, found {path.stat().st_size}")


def saved_file(path: Path) -> SavedFile:
    """Return what a manifest says of a file that was written."""
    ours = path.suffix == RANK_FILE
    digest = "" if ours else hashlib.sha256(path.read_bytes()).hexdigest()
    return SavedFile(num_bytes=path.stat().st_size, sha256=digest)


def read_checked(folder: Path, name: str, files: Mapping[str, SavedFile]) -> bytes:
    """Return a file's bytes if they are what was saved."""
    path, expected = folder / name, files.get(name)
    if expected is None or not expected.sha256:
        raise InputError(f"{path}: has no checksum in {MANIFEST}; load another checkpoint")
    _check_size(folder, name, expected)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read ({error.strerror})") from None
    return check_content(str(path), name, content, files)


def check_content(where: str, name: str, content: bytes, files: Mapping[str, SavedFile]) -> bytes:
    """Return a file's bytes if they are what was saved."""
    expected = files.get(name)
    if expected is None or not expected.sha256:
        raise InputError(f"{where}: has no checksum in {MANIFEST}; load another checkpoint")
    if hashlib.sha256(content).hexdigest() != expected.sha256:
        raise DamagedError(f"{where}: does not match its checksum; load another checkpoint")
    return content


# --- the model it is of --------------------------------------------------------------------


def model_document(spec: ModelSpec) -> dict[str, object]:
    """Return a model as plain values, as they come back from a file."""
    value: dict[str, object] = json.loads(json.dumps(document.plain(spec)))
    return value


def check_model(folder: Path | str, manifest: Manifest, spec: ModelSpec) -> None:
    """Refuse a checkpoint of another model, naming the first thing that differs."""
    if manifest.model_hash == spec.fingerprint:
        return
    own = {**model_document(spec), "name": ""}
    place, theirs, ours = _difference({**manifest.model, "name": ""}, own) or ("hash", "?", "?")
    raise InputError(
        f"{folder}: is of another model: '{place}' is {theirs} there and {ours} here; resume with "
        "the model it was saved by"
    )


_Difference = tuple[str, str, str]  # place, theirs, ours


def _difference(theirs: object, ours: object, place: str = "") -> _Difference | None:
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in [*theirs, *(key for key in ours if key not in theirs)]:
            inner = f"{place}.{key}" if place else str(key)
            inside = _difference(theirs.get(key, _DEFAULT), ours.get(key, _DEFAULT), inner)
            if inside:
                return inside
        return None
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for index, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            inside = _difference(one, other, f"{place}[{index}]")
            if inside:
                return inside
        return None
    if theirs == ours:
        return None
    return place, _quoted(theirs), _quoted(ours)


_DEFAULT = object()  # a field that is left out


def _quoted(value: object) -> str:
    return "the default" if value is _DEFAULT else shown(value)
