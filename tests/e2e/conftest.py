"""What end-to-end tests have in common."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which commands are typed."""
    monkeypatch.chdir(tmp_path)
    for name in ("TUTTI_DEBUG", "TUTTI_DEVICE", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    from tests.support.train_job import write_job

    return write_job(tmp_path)
