"""Engines whose blocks run in one pass say what others say, and tell of numbers that are none."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from tests.support.engines import engine_of  # noqa: E402
from tests.support.models import SIZES, fill  # noqa: E402
from tutti.accelerator import prepared  # noqa: E402
from tutti.accelerator.host import block  # noqa: E402
from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.batching import Finish  # noqa: E402
from tutti.models.families.registry import read_config  # noqa: E402
from tutti.nn import Model  # noqa: E402
from tutti.serve import Engine, SamplingParameters  # noqa: E402
from tutti.serve.loading import prepare  # noqa: E402

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES, "num_key_value_heads": 2, "head_dim": 16},
    "qwen3": {"model_type": "qwen3", **SIZES, "num_key_value_heads": 1, "head_dim": 16},
    "mistral": {
        "model_type": "mistral", **SIZES, "num_key_value_heads": 4, "head_dim": 16,
        "sliding_window": 5,
    },
}  # fmt: skip
PROMPTS = [[5, 6, 7], [8, 9], [1, 4, 4, 2, 3], [60] * 12, [5, 6, 9]]


def opened(kind: str, dtype: Any) -> Engine:
    model = Model(read_config(KINDS[kind], kind), Operators("cpu", forced={}).as_serving(),
                  dtype=dtype)  # fmt: skip
    fill(model).eval().requires_grad_(False)
    prepare(model)
    return engine_of(model, slots=4, page_size=4, max_length=48, most_tokens=9)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let panels be made at once; the rows of every block that ran as one."""
    monkeypatch.setattr(prepared, "PATIENCE", 0)
    rows: list[int] = []
    real = block.dense_block

    def noted(x: Any, *others: Any) -> Any:
        rows.append(len(x))
        return real(x, *others)

    monkeypatch.setattr(block, "dense_block", noted)
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_same(kind: str, ran: list[int]) -> None:
    wanted = SamplingParameters(max_tokens=9, ignore_end=True)
    own, apart = opened(kind, torch.float32), opened(kind, torch.float32)
    apart.worker.cache.steps_apart = True
    expected = [done.tokens for done in apart.generate(PROMPTS, wanted)]
    assert not ran
    assert [done.tokens for done in own.generate(PROMPTS, wanted)] == expected
    assert set(ran) >= {1, 4}


def test_an_adapter_has_its_blocks_run_one_by_one(ran: list[int]) -> None:
    engine = opened("llama", torch.float32)
    layer = engine.worker.model.blocks[0].mlp
    assert layer is not None

    class Nothing:
        def added(self, _operators: Any, y: Any, _x: Any) -> Any:
            return y

    layer.down.adapted = Nothing()  # type: ignore[assignment]
    engine.generate(PROMPTS[:1], SamplingParameters(max_tokens=4, ignore_end=True))
    assert ran == [3, 1, 1, 1]  # of the other block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_module_that_failed_is_named(dtype: Any, ran: list[int]) -> None:
    engine = opened("llama", dtype)
    number = engine.add(PROMPTS[0], SamplingParameters(max_tokens=5, ignore_end=True))
    engine.step()
    embedding = engine.worker.model.embedding
    assert embedding is not None
    with torch.no_grad():
        embedding.token.weight.fill_(torch.nan)
    engine.step()
    assert ran == [3, 3, 1, 1]
    done = engine.take(number)
    assert done is not None
    assert done.answers[0].finish is Finish.FAILED
    assert "0.token was the first that was not finite" in done.answers[0].reason
    assert not engine.worker.cache.steps_apart
