"""The small files beside a model's weights (config, tokenizer) that an export needs again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tutti.huggingface.hf_folder import is_weights
from tutti.huggingface.side_files import plain_paths

_MOST_BYTES = 64 << 20  # of one file: anything larger is no description of a model


def copy_model_files(source: Path, target: Path) -> None:
    """Copy what describes a model, and wait until it is on the disk."""
    for path in plain_paths(source):
        name = path.relative_to(source)
        if is_weights(path.name) or path.stat().st_size > _MOST_BYTES:
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / name)
        with (target / name).open("rb") as stream:
            os.fsync(stream.fileno())
