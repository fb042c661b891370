"""Opens a folder of weights, whichever kind it is."""

from __future__ import annotations

from pathlib import Path

from tutti.errors import InputError
from tutti.huggingface.checkpoint import Checkpoint
from tutti.huggingface.hf_folder import HfFolder, is_quantised
from tutti.huggingface.manifest import MANIFEST
from tutti.huggingface.tutti_folder import TuttiFolder
from tutti.models.load import hub_error, is_hub_id


def open_checkpoint(folder: Path | str, *, quantised: bool = False) -> Checkpoint:
    """Open a Hugging Face or a tutti folder; one with quantised weights only if that is asked."""
    path = Path(folder)
    if is_hub_id(str(folder)):
        raise hub_error(str(folder))
    if path.name.endswith(".partial"):
        raise InputError(
            f"{path}: is half-written; finish it with tutti convert --resume, or remove it"
        )
    if (path / MANIFEST).is_file():
        return TuttiFolder(path)
    if quantised and is_quantised(path):
        from tutti.huggingface.quantised.folder import QuantisedFolder  # needs torch

        return QuantisedFolder(path)
    return HfFolder(path)
