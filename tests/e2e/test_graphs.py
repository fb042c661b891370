"""Blocks as graphs on a device whose graphs are as strict about memory as a chip's.

Everything is trained once with graphs and once without, in a process of its own, and must come to
the same numbers to the last bit.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.support.second_process import second_device

BLOCKS, CAPTURED_STEPS = 2, 2
PASSES = 2  # forward and backward; of several micro-batches weight passes go onto sums elsewhere


# tests/unit/train/graphs asks the same without a process
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return trained()


def trained(*scenarios: str) -> dict[str, Any]:
    done = second_device("-m", "tests.support.graph_training", *scenarios)
    assert done.returncode == 0, done.stderr[-3000:]
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


def assert_same(both: dict[str, Any]) -> None:
    plain, captured = both["off"], both["on"]
    for what in ("losses", "norms", "weights"):
        assert captured[what] == plain[what], what
        assert all(map(math.isfinite, plain[what])), what
    assert plain["replays"] == 0
    assert plain["said"] == []


@pytest.mark.parametrize(
    ("name", "micro_batches", "slots"),
    [
        ("one micro-batch", 1, 1),
        ("one after the other", 3, 1),
        ("three in flight", 3, 3),
        ("experts", 1, 1),
        ("experts in flight", 3, 3),
    ],
)
def test_the_same_training(
    found: dict[str, Any], name: str, micro_batches: int, slots: int
) -> None:
    both = found["same"][name]
    assert_same(both)
    captured = both["on"]
    assert captured["balances"] == both["off"]["balances"]
    assert all(balance > 0 for balance in captured["balances"]) == name.startswith("experts")
    passes = PASSES if micro_batches > 1 else PASSES + 1
    assert captured["replays"] == BLOCKS * passes * CAPTURED_STEPS * micro_batches
    assert captured["said"][0] == "capture: 2 blocks run as graphs"
    assert captured["said"][1].startswith(f"capture: graphs in {slots} slots hold ")
    assert 0 < captured["held"] <= both["off"]["moving"] + captured["extra"]


@pytest.mark.parametrize("name", ["zero bubble", "interleaved"])
def test_stages_of_a_pipeline(found: dict[str, Any], name: str) -> None:
    both = found["stages"][name]
    assert_same(both)
    blocks, micro_batches, captured_steps = 4, 4, 2
    assert both["on"]["replays"] == blocks * PASSES * micro_batches * captured_steps


@pytest.mark.parametrize(
    ("name", "line", "replays"),
    [
        ("recomputed", "capture: 1 blocks run as they are: activations are recomputed", True),
        (
            "experts",
            "capture: 1 blocks run as they are: the host reads how many rows each expert gets",
            True,
        ),
        ("packed", "capture: batches of packed documents run as they are", False),
    ],
)
def test_what_cannot_be_captured_runs_as_it_is(
    found: dict[str, Any], name: str, line: str, replays: bool
) -> None:
    both = found["refused"][name]
    assert_same(both)
    assert line in both["on"]["said"]
    assert bool(both["on"]["replays"]) is replays


def test_a_capture_that_fails(found: dict[str, Any]) -> None:
    assert_same(found["host_read"])
    captured = found["host_read"]["on"]
    assert captured["replays"] == 0
    assert captured["said"][-1] == (
        "capture: blocks run as they are: CaptureError: aten._local_scalar_dense.default: not "
        "permitted while a graph is captured"
    )


def test_a_backward_that_fails_to_be_captured(found: dict[str, Any]) -> None:
    """Forward was captured by then: it is done once more for the sake of its backward."""
    assert_same(found["host_read_in_backward"])
    captured = found["host_read_in_backward"]["on"]
    assert 0 < captured["replays"] <= BLOCKS * 2
    assert captured["said"][-1].endswith("not permitted while a graph is captured")


def test_parameters_that_moved_are_found_again(found: dict[str, Any]) -> None:
    assert_same(found["parameters_move"])
    assert found["parameters_move"]["on"]["said"][-1] == (
        "capture: parameters of unit 1 moved; graphs are made anew"
    )


def test_a_loss_between_steps(found: dict[str, Any]) -> None:
    assert_same(found["evaluated"])
    seen = found["evaluated"]["seen"]
    assert seen["on"] == seen["off"]


def test_passes_in_any_order(found: dict[str, Any]) -> None:
    assert len(found["orders"]) == 3
    assert_close(found["orders"])


@pytest.mark.slow
def test_passes_in_every_order_added_up_or_not() -> None:
    assert_close(trained("every_order")["every_order"])


def assert_close(orders: dict[str, Any]) -> None:
    """Norms' gradients of two micro-batches add up in another order, so a last bit may differ."""
    for both in orders.values():
        assert both["on"] == pytest.approx(both["off"], rel=1e-6)
        assert all(map(math.isfinite, both["on"]))


@pytest.mark.parametrize("name", ["one pool for all slots", "weight passes hold nothing"])
def test_a_mistake_about_lifetimes_shows(found: dict[str, Any], name: str) -> None:
    """The checks above must be able to fail."""
    right, wrong = found["mistakes"]["right"], found["mistakes"][name]
    assert all(map(math.isfinite, right))
    assert not all(map(math.isfinite, wrong))
