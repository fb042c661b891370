"""Compiled blocks: where, and what happens when one fails to compile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.support.models import batch_of, make, spec_of  # noqa: E402
from tutti.accelerator.devices.cpu import CpuAccelerator  # noqa: E402
from tutti.nn import compile_blocks  # noqa: E402


class Other(CpuAccelerator):
    """A chip that is compiled for; counts what runs compiled."""

    name = "other"
    gains_by_compiling = True
    calls = 0
    fails = False

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def compiled(*args: Any, **options: Any) -> Any:
            if self.fails:
                raise RuntimeError("no such kernel\nand a long trace")
            self.calls += 1
            return function(*args, **options)

        return compiled


def test_the_cpu_is_left_alone() -> None:
    assert compile_blocks(make(spec_of("dense")), CpuAccelerator()) == 0


def test_every_block_runs_compiled() -> None:
    spec = spec_of("dense")
    model, batch, chip = make(spec), batch_of(spec), Other()
    expected = model(None, batch).loss.detach()
    assert compile_blocks(model, chip) == spec.num_layers
    assert torch.equal(model(None, batch).loss.detach(), expected)
    assert chip.calls == spec.num_layers


def test_a_failure_is_one_line_and_the_plain_block(caplog: pytest.LogCaptureFixture) -> None:
    spec = spec_of("dense")
    model, batch, chip = make(spec), batch_of(spec), Other()
    expected = model(None, batch).loss.detach()
    chip.fails = True
    compile_blocks(model, chip)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(model(None, batch).loss.detach(), expected)
    assert [record.getMessage() for record in caplog.records] == [
        "blocks run uncompiled: RuntimeError: no such kernel"
    ]


def test_an_error_of_the_block_itself_is_not_hidden() -> None:
    spec = spec_of("dense")
    model, chip = make(spec), Other()
    compile_blocks(model, chip)
    with pytest.raises(RuntimeError):
        model.blocks[0](torch.zeros(3, 5), batch_of(spec))
