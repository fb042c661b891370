"""What is asked before FlashAttention 4 is called; its kernels are held against the reference by
`tutti accelerator check` on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tutti.accelerator.cuda import flash4
from tutti.accelerator.segments import Segments

WHOLE = Segments.batch(2, 32)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash4, "_checked_on", lambda _device: True)


@pytest.mark.parametrize("files", [["cute/interface.py"], ["flash_attn_interface.py"]])
def test_flash_attention_2_has_the_same_name(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "cutlass/__init__.py",
        "flash_attn/__init__.py",
        *(f"flash_attn/{f}" for f in files),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert flash4.installed.__wrapped__() is ("cute/interface.py" in files)


def answer(
    segments: Segments = WHOLE,
    width: int = 64,
    value_width: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> str | None:
    tokens = segments.num_queries
    q, k = (torch.zeros(tokens, 4, width, dtype=dtype) for _ in range(2))
    v = torch.zeros(tokens, 4, value_width or width, dtype=dtype)
    return flash4.IMPLEMENTATIONS[0].supports(q, k, v, segments, scale=0.1, **options)


def test_calls_it_takes() -> None:
    assert answer() is None
    assert answer(width=192, value_width=128) is None
    assert answer(window=8, soft_cap=30.0, sinks=torch.zeros(4)) is None
    assert answer(causal=False) is None


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("no key bias", {"key_bias": torch.zeros(4, 64)}),
        ("sliding windows", {"window": 8, "window_kind": "chunked"}),
        ("sliding windows of causal", {"window": 8, "causal": False}),
        ("bfloat16 and float16", {"dtype": torch.float32}),
        ("heads of", {"width": 40}),
        ("heads of", {"width": 32, "value_width": 16}),
        ("heads of", {"width": 512}),
    ],
)
def test_calls_that_others_take(reason: str, options: dict[str, Any]) -> None:
    said = answer(**options)
    assert said is not None
    assert said.startswith(reason)
