"""Whole steps on a GPU: blocks as graphs train alike, and issuing a step waits for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support.any_plan import FOUR, GPIPE, PLAIN, Draft
from tests.support.training import batches_of, engine_of, in_precision, settings
from tutti.accelerator import open_accelerator
from tutti.accelerator.reference import linear as reference
from tutti.nn.batch import Batch
from tutti.plan.plan import Plan
from tutti.ranks.single_rank import NoLinks
from tutti.train.data.feeder import to_batch
from tutti.train.engine.engine import Engine
from tutti.train.graphs.captured_blocks import CaptureMode, CaptureSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
STEPS = 6


class Alone(NoLinks):
    rank = 0


def plan_of(kind: Any, micro_batches: int) -> Plan:
    line = Draft().line((FOUR, [{"sequences": 2}]), micro_batches=micro_batches)
    return in_precision(line.plan(kind), "bf16")


def made(plan: Plan, mode: CaptureMode) -> tuple[Engine, list[str]]:
    said: list[str] = []
    chosen = CaptureSettings(mode=mode, say=said.append)
    chip = open_accelerator("cuda")
    links: Any = Alone()
    return engine_of(plan, plan.model.spec, links, accelerator=chip, capture=chosen), said


def fed(engine: Engine, step: int) -> Callable[[int], Batch]:
    """Batches as a feeder brings them, from pinned memory."""
    host = batches_of(engine, step)

    def batch(micro_batch: int) -> Batch:
        own = host(micro_batch)
        assert own.targets_t is not None
        both = engine.accelerator.pinned((2, own.num_tokens), torch.int64)
        both.copy_(torch.stack((own.tokens_t, own.targets_t)))
        return to_batch(engine.spec, engine.accelerator, both, (own.lengths,))

    return batch


def losses(plan: Plan, mode: CaptureMode) -> tuple[list[float], list[float], list[str]]:
    engine, said = made(plan, mode)
    results = [engine.step(fed(engine, step), settings()) for step in range(STEPS)]
    return [r.loss for r in results], [r.gradient_norm for r in results], said


@pytest.mark.parametrize(("kind", "micro_batches"), [(PLAIN, 1), (PLAIN, 3), (GPIPE, 3)])
def test_graphs_train_alike(kind: Any, micro_batches: int) -> None:
    plan = plan_of(kind, micro_batches)
    plain, captured = losses(plan, "off"), losses(plan, "on")
    assert captured[0] == pytest.approx(plain[0], rel=2e-3)
    assert captured[1] == pytest.approx(plain[1], rel=2e-2)
    assert captured[2][0] == "capture: 2 blocks run as graphs"
    assert len(captured[2]) == 2, captured[2]


@contextmanager
def no_waiting() -> Iterator[None]:
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", ["off", "on"])
def test_issuing_a_step_waits_for_nothing(mode: CaptureMode) -> None:
    engine, _ = made(plan_of(GPIPE, 2), mode)
    issue, count = engine.issue, 0

    def watched() -> None:
        nonlocal count
        if engine.step_number < 3:  # kernels are made, blocks are captured
            issue()
            return
        count += 1
        with no_waiting():
            issue()

    engine.issue = watched  # type: ignore[method-assign]
    for step in range(5):
        engine.step(fed(engine, step), settings())
    assert count == 2


def test_the_check_can_fail() -> None:
    x = torch.ones(3, device="cuda")
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        float(x.sum())


def test_embedding_gradients_wait_for_nothing() -> None:
    tokens = torch.randint(50, (4096,))
    table = torch.randn(64, 32)
    up = torch.randn(4096, 32)
    expected = torch.zeros(64, 32, dtype=torch.float64).index_add_(0, tokens, up.double())
    own = table.cuda().requires_grad_()
    rows = reference.embedding(tokens.cuda(), own)
    upwards = up.cuda()
    torch.cuda.synchronize()
    with no_waiting():
        rows.backward(upwards)
    assert own.grad is not None
    torch.testing.assert_close(own.grad.cpu().double(), expected, rtol=1e-4, atol=1e-4)
