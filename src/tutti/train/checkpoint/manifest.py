"""`tutti.json` of a checkpoint: what was saved, by which job, and how far it had come.

It is the last file that is written and names all others with their sizes, so a folder that lost one
is recognised without reading it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tutti import document
from tutti.document import Count, Natural, Place, build, plain_fields, shown
from tutti.errors import InputError
from tutti.files import parse_json, pretty_json, read_text
from tutti.models.spec import ModelSpec
from tutti.plan.job import Precision

MANIFEST = "tutti.json"
PLAN = "plan.json"
MODEL_FOLDER = "model"  # config.json, tokenizer: what an export needs beside the weights
FORMAT = "tutti-training/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job has come: enough to go on at the very next sample."""

    step: Natural = 0  # batches consumed, also those whose update was skipped
    samples: Natural = 0  # sequences consumed, over all ranks
    tokens: Natural = 0
    seed: int = 0
    loss_scale: Mapping[str, float] = field(default_factory=dict)  # filled in by a save
    data: Mapping[str, object] = field(default_factory=dict)  # the data's own state, plain values


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """A generator's state, as hexadecimal bytes; `device` is the kind of chip it is of."""

    device: str
    state: str


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
    files: Mapping[str, Natural]  # name → bytes


def manifest_text(manifest: Manifest) -> str:
    """Return the file's text."""
    return pretty_json({"format": FORMAT, **plain_fields(manifest)}) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; name a checkpoint such as step-000100")
    if not path.is_file():
        raise InputError(f"{folder}: no checkpoint of a training run: it has no {MANIFEST}")
    place = Place(str(path))
    value = parse_json(read_text(path), str(path))
    if not isinstance(value, dict):
        raise place.error("not a manifest: expected a mapping at the top")
    fields = dict(value)
    found = fields.pop("format", None)
    if found != FORMAT:
        raise place.error(f"'format' is {shown(found)}; this version of tutti reads '{FORMAT}'")
    return build(Manifest, fields, place)


def damage(folder: Path) -> str | None:
    """Say in one line why a folder is no complete checkpoint; None if it is one."""
    try:
        manifest = read_manifest(folder)
    except InputError as error:
        return str(error)
    for name, num_bytes in manifest.files.items():
        path = folder / name
        if not path.is_file():
            return f"{path}: is missing"
        if path.stat().st_size != num_bytes:
            return f"{path}: expected {num_bytes} bytes, found {path.stat().st_size}"
    return None


# --- the model it is of --------------------------------------------------------------------


def model_document(spec: ModelSpec) -> dict[str, object]:
    """Return a model as plain values, as they come back from a file."""
    value: dict[str, object] = json.loads(json.dumps(document.plain(spec)))
    return value


def check_model(folder: Path, manifest: Manifest, spec: ModelSpec) -> None:
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
            found = _difference(theirs.get(key, _DEFAULT), ours.get(key, _DEFAULT), inner)
            if found:
                return found
        return None
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for index, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            found = _difference(one, other, f"{place}[{index}]")
            if found:
                return found
        return None
    if theirs == ours:
        return None
    return place, _quoted(theirs), _quoted(ours)


_DEFAULT = object()  # a field that is left out


def _quoted(value: object) -> str:
    return "the default" if value is _DEFAULT else shown(value)
