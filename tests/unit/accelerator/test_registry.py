from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tutti.accelerator.operators import OVERRIDE, Operators, overrides
from tutti.accelerator.registry import (
    Implementation,
    implementations,
    operator_names,
    register,
    registered,
    unregister,
)
from tutti.errors import InputError


def doubled(x: torch.Tensor, weight: object, *, eps: float, unit_offset: bool) -> torch.Tensor:
    return 2 * x


def only_float32(x: torch.Tensor, *_others: object, **_options: object) -> str | None:
    return None if x.dtype is torch.float32 else "float32 only"


@pytest.fixture
def doubling() -> Iterator[Implementation]:
    new = Implementation(
        operator="rms_norm", name="doubling", function=doubled, supports=only_float32, rank=5
    )
    register(new)
    yield new
    unregister("rms_norm", "doubling")


def test_every_operator_has_a_method_and_a_reference() -> None:
    for name in operator_names():
        assert callable(getattr(Operators, name))
        assert registered(name, "cpu")[-1].name == "reference" or any(
            i.name == "reference" for i in registered(name, "cpu")
        )


def test_the_highest_rank_that_supports_the_call_runs(doubling: Implementation) -> None:
    operators = Operators("cpu", forced={})
    x = torch.ones(2, 4)
    assert torch.equal(operators.rms_norm(x, None, eps=0.0), 2 * x)
    half = operators.rms_norm(x.bfloat16(), None, eps=0.0)
    assert torch.equal(half, x.bfloat16())
    assert operators.chosen("rms_norm", x, None, eps=0.0, unit_offset=False) is doubling
    assert operators.preferred("rms_norm") == ("doubling", "ranked")
    assert operators.preferred("route") == ("reference", "the only one")


def test_a_forced_implementation_runs_or_says_why_not(
    doubling: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OVERRIDE, "rms_norm=reference")
    x = torch.ones(2, 4)
    operators = Operators("cpu")
    assert torch.equal(operators.rms_norm(x, None, eps=0.0), x)
    assert operators.preferred("rms_norm") == ("reference", "forced")
    forced = Operators("cpu", forced={"rms_norm": "doubling"})
    with pytest.raises(InputError) as error:
        forced.rms_norm(x.double(), None, eps=0.0)
    assert str(error.value) == (
        "operator 'rms_norm' on cpu has no implementation for this call: doubling: float32 only"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rms_nrom=reference", "TUTTI_OPERATORS: 'rms_nrom'; did you mean 'rms_norm'?"),
        ("rms_norm", "TUTTI_OPERATORS: 'rms_norm'; write operator=implementation"),
        ("rms_norm=", "TUTTI_OPERATORS: 'rms_norm='; write operator=implementation"),
    ],
)
def test_a_bad_override(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        overrides(text)
    assert str(error.value) == message


def test_an_override_with_an_unknown_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, " attention=spda , ")
    with pytest.raises(InputError, match="'attention' on cpu: 'spda'; did you mean 'sdpa'"):
        Operators("cpu")


def test_registering_twice_or_for_nothing(doubling: Implementation) -> None:
    with pytest.raises(InputError, match="has an implementation 'doubling' already"):
        register(doubling)
    with pytest.raises(InputError, match="did you mean 'rms_norm'"):
        register(Implementation(operator="rms_norms", name="x", function=doubled))
    with pytest.raises(InputError, match="no operator 'rmsnorm'"):
        implementations("rmsnorm", "cpu")


def test_taking_back() -> None:
    with pytest.raises(InputError, match="the reference cannot be taken away"):
        unregister("rms_norm", "reference")
    with pytest.raises(InputError, match="has no implementation 'doublin'"):
        unregister("rms_norm", "doublin")


def test_devices_and_packages_it_needs() -> None:
    here = Implementation(operator="linear", name="a", function=doubled)
    elsewhere = Implementation(operator="linear", name="b", function=doubled, devices=("tpu",))
    missing = Implementation(operator="linear", name="c", function=doubled, needs="no_such_package")
    assert here.runs_on("cpu")
    assert not elsewhere.runs_on("cpu")
    assert elsewhere.runs_on("tpu")
    assert here.present
    assert not missing.present
    register(missing)
    try:
        assert "c" not in [i.name for i in implementations("linear", "cpu")]
        assert "c" in [i.name for i in registered("linear", "cpu")]
    finally:
        unregister("linear", "c")
