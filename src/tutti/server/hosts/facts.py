"""What a front and its hosts compare before they work together. Needs no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tutti.errors import InputError
from tutti.files import pretty_json
from tutti.plan.files import plan_to_document
from tutti.plan.plan import Plan
from tutti.server.hosts.messages import Facts
from tutti.version import code_version

_SAMPLE = 1 << 16
_SAMPLES = 16  # of a file: reading all of a large model would take minutes
_WEIGHTS = ("*.safetensors", "*.gguf")


def facts_of(plan: Plan, folder: Path) -> Facts:
    """Return the facts of this host."""
    text = pretty_json(plan_to_document(plan))
    return Facts(
        version=code_version(),
        plan=hashlib.sha256(text.encode()).hexdigest()[:16],
        model=weights_digest(folder),
    )


def weights_digest(folder: Path) -> str:
    """Return a digest of a model folder: its configuration, and samples of its weights."""
    digest = hashlib.sha256()
    config = folder / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for path in sorted(weights for kind in _WEIGHTS for weights in folder.glob(kind)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for part in range(_SAMPLES):
                file.seek(part * max(1, size - _SAMPLE) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:16]


def require_same(own: Facts, theirs: Facts, host: str) -> None:
    """Raise where a host has come with something else; say what."""
    remedies = {
        "version": "install the same tutti on all hosts",
        "plan": "give all hosts the same plan file",
        "model": "give all hosts the same model folder",
    }
    for name, remedy in remedies.items():
        mine, other = getattr(own, name), getattr(theirs, name)
        if mine != other:
            raise InputError(f"serve: {host} has {name} {other}, the front has {mine}; {remedy}")
