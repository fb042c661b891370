"""Comparing dumps of training runs: which step and which unit part first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.unit.huggingface.test_comparison import BATCH, FACTS
from tutti.errors import InputError
from tutti.huggingface.comparison import Key, TensorKind, compare
from tutti.huggingface.dtypes import BY_NAME
from tutti.huggingface.dumps import DumpWriter

NAMES = ("2.up.weight", "2.key.bias", "1.up.weight")  # in the order of the backward pass
STEPS = 2
TRAINED = replace(FACTS, side="plan:a.json", steps=STEPS, device="2 ranks of pair")
Values = dict[str, np.ndarray]


def run() -> Values:
    """What a side writes, in the order of execution."""
    generator = np.random.default_rng(0)

    def some(name: str, size: float) -> np.ndarray:
        scale = 1e-9 * size if name.endswith("key.bias") else size  # zero, but for rounding
        return (scale * generator.normal(size=(4, 6))).astype(np.float32)

    found: Values = {f"step-0/weight/{name}": some(name, 0.1) for name in NAMES}
    for step in range(1, STEPS + 1):
        found[f"step-{step}/loss"] = np.array([5.5 / step], np.float32)
        found |= {f"step-{step}/gradient/{name}": some(name, 1.0) for name in NAMES}
        found[f"step-{step}/gradient_norm"] = np.array([7.0], np.float32)
        found |= {f"step-{step}/weight/{name}": some(name, 0.1) for name in NAMES}
    return found


def write(target: Path, factors: dict[str, float] | None = None, dtype: str = "float32") -> Path:
    """Write a run, with some tensors times a factor."""
    values = run()
    for key, factor in (factors or {}).items():
        values[key] = values[key] * np.float32(factor)
    with DumpWriter(target, replace(TRAINED, dtype=dtype), BATCH) as writer:
        for key, value in values.items():
            writer.record_raw(key, value.view(np.uint32), BY_NAME["float32"])
    return target


@pytest.mark.parametrize(
    ("key", "step", "kind", "unit"),
    [
        ("forward/3.mlp", None, TensorKind.FORWARD, 3),
        ("forward/loss", None, TensorKind.FORWARD, None),
        ("gradient/3.mlp.up.weight", None, TensorKind.GRADIENT, 3),
        ("step-12/gradient/0.token.weight", 12, TensorKind.GRADIENT, 0),
        ("step-0/weight/5.logits.weight", 0, TensorKind.WEIGHT, 5),
        ("step-2/loss", 2, TensorKind.FORWARD, None),
        ("step-2/gradient_norm", 2, TensorKind.GRADIENT, None),
    ],
)
def test_keys_say_what_they_are(
    key: str, step: int | None, kind: TensorKind, unit: int | None
) -> None:
    found = Key.parse(key)
    assert (found.step, found.kind, found.unit) == (step, kind, unit)


def test_equal_runs_agree_and_show_their_losses(tmp_path: Path) -> None:
    result = compare(write(tmp_path / "a"), write(tmp_path / "b", {"step-2/loss": 1 + 1e-6}))
    assert result.first_divergence is None
    assert [step for step, _, _ in result.losses] == [1, 2]
    assert result.losses[0][1:] == (5.5, 5.5)
    assert result.losses[1][2] > result.losses[1][1]


def test_the_first_step_and_the_unit_nearest_the_head_are_named(tmp_path: Path) -> None:
    """A wrong scale in unit 2 also moves the norm, and everything of the next step."""
    wrong = {"step-1/gradient/2.up.weight": 1.01, "step-1/gradient_norm": 1.005}
    wrong |= {f"step-2/gradient/{name}": 0.5 for name in NAMES} | {"step-2/loss": 1.1}
    result = compare(write(tmp_path / "a"), write(tmp_path / "b", wrong))
    first = result.first_divergence
    assert first is not None
    assert first.key == "step-1/gradient/2.up.weight"
    assert first.relative_l2 == pytest.approx(0.01 / 1.01, rel=1e-3)


@pytest.mark.parametrize(
    ("key", "factor", "dtype", "diverges"),
    [
        ("step-1/gradient/1.up.weight", 1 + 3e-5, "float32", True),
        ("step-2/gradient/1.up.weight", 1 + 3e-5, "float32", False),  # AdamW came before it
        ("step-2/gradient/1.up.weight", 1 + 3e-4, "float32", True),
        ("step-1/weight/1.up.weight", 1 + 1e-5, "float32", False),
        ("step-1/weight/1.up.weight", 1 + 5e-5, "float32", True),
        ("step-0/weight/1.up.weight", 1 + 5e-5, "float32", True),
        ("step-2/loss", 1 + 5e-5, "float32", True),
        ("step-2/gradient_norm", 1 + 5e-5, "float32", True),
        ("step-2/gradient/1.up.weight", 1.2, "bfloat16", False),
        ("step-2/gradient/1.up.weight", 1.5, "bfloat16", True),
        ("step-1/gradient/1.up.weight", 1.2, "bfloat16", True),
    ],
)
def test_what_is_allowed_follows_from_format_and_step(
    tmp_path: Path, key: str, factor: float, dtype: str, diverges: bool
) -> None:
    a, b = write(tmp_path / "a", dtype=dtype), write(tmp_path / "b", {key: factor}, dtype=dtype)
    first = compare(a, b).first_divergence
    assert (first.key if first else None) == (key if diverges else None)


def test_weights_that_follow_rounding_noise_are_not_compared(tmp_path: Path) -> None:
    """AdamW makes whole updates out of the noise, in another direction on each side."""
    noise = {"step-1/gradient/2.key.bias": -1.0, "step-1/weight/2.key.bias": -1.0}
    noise["step-2/weight/2.key.bias"] = -1.0
    result = compare(write(tmp_path / "a"), write(tmp_path / "b", noise))
    assert result.first_divergence is None
    assert result.noise == ("2.key.bias",)
    compared = [m.key for m in result.modules if m.key.endswith("weight/2.key.bias")]
    assert compared == ["step-0/weight/2.key.bias"]


def test_a_gradient_that_diverges_is_no_noise(tmp_path: Path) -> None:
    wrong = {"step-1/gradient/2.up.weight": -1.0, "step-1/weight/2.up.weight": -1.0}
    result = compare(write(tmp_path / "a"), write(tmp_path / "b", wrong))
    assert result.noise == ()
    assert "step-1/weight/2.up.weight" in {m.key for m in result.modules if m.diverges}


def test_runs_of_different_lengths_are_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    with DumpWriter(tmp_path / "b", replace(TRAINED, steps=3), BATCH):
        pass
    with pytest.raises(InputError, match="ran 2 steps of training, it 3"):
        compare(a, tmp_path / "b")
