"""Where a job's first weights come from, and what the model's own files ask for. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from tutti.errors import InputError
from tutti.train.run.config import TrainConfig


def model_folder(model: str) -> Path | None:
    """Return the folder of a model that is named by a folder or its config.json."""
    path = Path(model)
    if path.is_dir() and (path / "config.json").is_file():
        return path
    if path.name == "config.json" and path.is_file():
        return path.parent
    return None


def wants_pretrained(config: TrainConfig) -> bool:
    """Tell whether a run begins with the model's own weights; refuse if it cannot."""
    folder = model_folder(config.model)
    present = folder is not None and any(folder.glob("*.safetensors"))
    if config.start == "pretrained" and not present:
        raise InputError(
            f"start: pretrained, but {config.model} holds no .safetensors; give a model folder "
            "with weights, or start: random"
        )
    return present and config.start != "random"
