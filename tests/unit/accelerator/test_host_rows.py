"""Compiled loops of rows are for servers: others compute as they always did."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from tutti.accelerator.host import rows  # noqa: E402
from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.models import Activation  # noqa: E402

EPS = 1e-5


def test_who_serves_has_them_and_nobody_else() -> None:
    plain = Operators("cpu", forced={})
    x = torch.randn(3, 8)
    call = ("add_rms_norm", x, None, None)
    assert plain.chosen(*call, eps=EPS).name == "reference"
    assert plain.as_serving().chosen(*call, eps=EPS).name == "compiled"
    assert plain.chosen(*call, eps=EPS).name == "reference"
    forced = Operators("cpu", forced={"add_rms_norm": "reference"}).as_serving()
    assert forced.chosen(*call, eps=EPS).name == "reference"


@pytest.mark.parametrize("kind", [Activation.SILU, Activation.GELU_TANH])
def test_what_they_do_not_take_goes_the_other_way(kind: Activation) -> None:
    plain, x = Operators("cpu", forced={}), torch.randn(3, 8, dtype=torch.float64)
    serving = plain.as_serving()
    found = serving.gated_activation(x, kind=kind)
    torch.testing.assert_close(found, plain.gated_activation(x, kind=kind), rtol=0, atol=0)


def test_extremes_of_gates() -> None:
    plain = Operators("cpu", forced={})
    gates = [-1e4, -90.0, -1.0, -0.0, 1.0, 90.0, 1e4, float("inf"), float("nan")]
    x = torch.cat((torch.tensor([gates]), torch.full((1, len(gates)), 2.0)), dim=1)
    found = plain.as_serving().gated_activation(x, kind=Activation.SILU)
    expected = plain.gated_activation(x, kind=Activation.SILU)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_the_first_calls_do_not_wait_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    serving, plain = Operators("cpu", forced={}).as_serving(), Operators("cpu", forced={})
    monkeypatch.setattr(rows._Calls, "count", rows.PATIENCE - 2)
    monkeypatch.delitem(sys.modules, "numba")
    ran: list[str] = []
    real = rows._form
    monkeypatch.setattr(rows, "_form", lambda *given: (ran.append(given[1]), real(*given))[1])
    x = torch.randn(3, 8)
    for counted in range(4):
        found = serving.gated_activation(x, kind=Activation.SILU)
        torch.testing.assert_close(found, plain.gated_activation(x, kind=Activation.SILU))
        assert len(ran) == max(0, counted - 1)
