"""What a rank says when something is wrong: which module, which memory, which hardware."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.support.launching import plan_of  # noqa: E402
from tests.support.plans import small_model  # noqa: E402
from tests.support.training import batches_of, settings  # noqa: E402
from tutti.accelerator import open_accelerator  # noqa: E402
from tutti.accelerator.devices.emulated import EmulatedAccelerator  # noqa: E402
from tutti.cost.plan.sources import Sources  # noqa: E402
from tutti.errors import TuttiError  # noqa: E402
from tutti.hardware.cluster import Cluster  # noqa: E402
from tutti.nn.initialize import initialize  # noqa: E402
from tutti.plan.chips import ChipSet  # noqa: E402
from tutti.plan.plan import Replica  # noqa: E402
from tutti.ranks.single_rank import NoLinks  # noqa: E402
from tutti.simulate.estimate import estimate  # noqa: E402
from tutti.train.engine.engine import Engine  # noqa: E402
from tutti.train.run.culprit import find_culprit  # noqa: E402
from tutti.train.run.safety import (  # noqa: E402
    Built,
    check_arithmetic,
    explain_memory,
    hardware_differences,
)


@pytest.fixture
def built() -> Built:
    """Return an engine of one rank on one chip, and the prediction of its plan."""
    cluster, spec = Cluster.load("laptop"), small_model(4)
    plan = plan_of(cluster, [[Replica(chips=ChipSet.of("fast/0/0"))]], spec)
    accelerator = open_accelerator("cpu")
    engine = Engine(plan, spec, 0, accelerator, NoLinks(), clip_norm=1.0)
    initialize(engine.model, seed=1)
    engine.take_masters()

    return engine, estimate(plan, spec, cluster, Sources())


@pytest.fixture
def engine(built: Built) -> Engine:
    return built[0]


def culprit(engine: Engine, step: int) -> str:
    """Look for it as the only rank."""
    return find_culprit(
        engine,
        step,
        lambda: engine.step(batches_of(engine, step), settings(0.0)),
        lambda own: [own],
    )


def test_weights_that_were_broken_before(engine: Engine) -> None:
    name, parameter = next(
        (n, p) for n, p in engine.model.named_parameters() if n.startswith("units.3.")
    )
    with torch.no_grad():
        parameter.view(-1)[3] = float("nan")
    found = culprit(engine, 6)
    short = name.removeprefix("units.")
    assert found.startswith("step 7: loss or gradients are not finite; ")
    assert f"the weights of {short} were not finite before the step" in found


def leaves(engine: Engine, unit: int) -> list[tuple[str, Any]]:
    return [
        (name.removeprefix("units."), module)
        for name, module in engine.model.named_modules()
        if name.startswith(f"units.{unit}.") and not any(True for _ in module.children())
    ]


def test_a_module_that_overflows_is_named(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything behind it is not finite either; the first one is the culprit."""
    called: list[str] = []
    hooks = [
        module.register_forward_hook(lambda m, i, o, name=name: called.append(name))
        for name, module in leaves(engine, 2)
    ]
    engine.step(batches_of(engine, 0), settings(0.0))
    for hook in hooks:
        hook.remove()
    assert called, "no module of a block can be watched"
    name, module = next((n, m) for n, m in leaves(engine, 2) if n == called[0])
    forward = module.forward

    def overflowing(*inputs: Any, **words: Any) -> Any:
        found = forward(*inputs, **words)
        return (
            found * float("inf")
            if torch.is_tensor(found)
            else tuple(x * float("inf") if torch.is_tensor(x) else x for x in found)
        )

    monkeypatch.setattr(module, "forward", overflowing)
    found = culprit(engine, 0)
    assert f"first in forward: module {name} on rank 0 (fast/0/0)" in found


def test_finite_numbers_have_no_culprit(engine: Engine) -> None:
    assert "no single module shows it" in culprit(engine, 0)
    assert all(torch.isfinite(p).all() for p in engine.model.parameters())


def test_looking_for_it_changes_nothing_that_stays(engine: Engine) -> None:
    culprit(engine, 0)
    assert engine.around is None
    assert not any(m._forward_hooks for m in engine.model.modules())


def test_memory_is_explained(built: Built) -> None:
    error, engine = torch.OutOfMemoryError("tried to allocate 20 GiB\nmore"), built[0]
    text = explain_memory(error, engine.seat, engine.accelerator, built)
    assert text.startswith("out of memory on fast/0/0, pipeline 0 stage 0; ")
    assert text.endswith("; tried to allocate 20 GiB")
    for part in ("were in use", "parameters ", "optimizer ", "the plan promised "):
        assert part in text
    assert "\n" not in text


def test_memory_is_explained_before_there_is_an_engine(engine: Engine) -> None:
    text = explain_memory(torch.OutOfMemoryError(), engine.seat, engine.accelerator, None)
    assert text.startswith("out of memory on fast/0/0, pipeline 0 stage 0; ")
    assert "the plan promised" not in text


def test_other_hardware_than_planned() -> None:
    chip = Cluster.load("laptop").pool("fast").chip

    def opened(name: str, memory: float) -> Any:
        return EmulatedAccelerator(chip=name, mode="dilated", factor=1.0, memory_bytes=int(memory))

    assert hardware_differences(opened("CPU-fast", chip.memory_bytes), chip) == []
    assert hardware_differences(opened("CPU-fast", 0.95 * chip.memory_bytes), chip) == []
    (other,) = hardware_differences(opened("CPU-slow", chip.memory_bytes), chip)
    assert other == "the plan expects CPU-fast, this is CPU-slow"
    (less,) = hardware_differences(opened("CPU-fast", 0.5 * chip.memory_bytes), chip)
    assert less == "the plan expects 4.0 GiB of memory, here are 2.0 GiB"


def test_a_chip_that_multiplies_right_may_train(engine: Engine) -> None:
    check_arithmetic(engine)


def test_a_chip_that_multiplies_wrongly_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = engine.accelerator.operators.linear

    def wrong(x: Any, w: Any, *more: Any, **words: Any) -> Any:
        y = linear(x, w, *more, **words).clone()
        y[3:5] = 0.0
        return y

    monkeypatch.setattr(engine.accelerator.operators, "linear", wrong)
    with pytest.raises(TuttiError, match=r"rank 0 .*multiplies wrongly: x·Wᵀ of .* of its rows"):
        check_arithmetic(engine)
