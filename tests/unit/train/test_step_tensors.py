"""Every step's gradients and weights, put together from ranks that keep different parts."""

from __future__ import annotations

import shutil
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.support.plans import small_model
from tests.support.step_dumps import dump_steps, in_two_stages, in_unequal_shares
from tests.support.threads import World
from tests.support.training import engine_of, in_fp32, train_alone
from tutti.cli.main import app
from tutti.errors import InputError
from tutti.huggingface.comparison import Key, compare
from tutti.huggingface.dumps import Dump
from tutti.plan.plan import Plan, Share, Synchronisation
from tutti.train.engine.engine import Engine
from tutti.train.run.step_dump import write_step_dump
from tutti.train.state.state import SpanState


def sharded(level: int) -> Plan:
    """The unequal shares, with shards that are unequal, too."""
    plan = in_unequal_shares()
    units = plan.model.spec.num_units if plan.model.spec is not None else 0
    shares = (Share(pipeline=0, stage=0, replica=0, weight=3),
              Share(pipeline=0, stage=0, replica=1, weight=1))  # fmt: skip
    rule = Synchronisation(units=(0, units), shard_level=level, shares=shares)
    return replace(plan, synchronisation=(rule,))


def scale_unit(unit: int, factor: float, rank: int):  # type: ignore[no-untyped-def]
    """Return a fault: one rank multiplies the gradients of one unit by a factor, again and again.

    With each micro-batch that joins them.
    """

    def plant(engine: Engine) -> None:
        collect = engine.parameters.collect

        def wrong(start: int, stop: int, lent: Container[int] = ()) -> None:
            collect(start, stop, lent)
            if start <= unit < stop:
                for exchange in engine.parameters.of_units([unit]):
                    for state in exchange.states:
                        scale_gradients(state, unit, factor)

        if engine.seat.rank == rank:
            engine.parameters.collect = wrong  # type: ignore[method-assign]

    return plant


def scale_gradients(state: SpanState, unit: int, factor: float) -> None:
    """Multiply the gradients so far of one unit."""
    gathered = state._cut(state.gradient) if state.gradient is not None else []
    parts = dict(enumerate(gathered)) if state.loose is None else state.loose
    for i, part in parts.items():
        if state.span.blocks[i].unit == unit:
            part *= factor


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dump_steps(in_two_stages(), tmp_path_factory.mktemp("dumps") / "a")


def test_a_dump_holds_what_one_process_computes(staged: Path) -> None:
    plan, dump = in_two_stages(), Dump(staged)
    spec = plan.model.spec
    assert spec is not None
    alone = train_alone(in_fp32(plan, "adamw"), spec, 1)
    assert dump.facts.steps == 2
    assert list(dump.tensors)[-1] == "step-2/weight/0.token.weight"
    assert dump.numbers("step-1/loss") == pytest.approx(alone.losses[0], rel=1e-6)
    assert dump.numbers("step-1/gradient_norm") == pytest.approx(alone.norms[0], rel=1e-5)
    for name, gradient in alone.gradients.items():
        found = torch.from_numpy(dump.numbers(f"step-1/gradient/{name}"))
        expected = gradient.double().flatten()
        assert float((found - expected).norm() / expected.norm()) < 1e-5, name


@pytest.mark.parametrize("level", [0, 1, 3])
def test_two_plans_train_alike(staged: Path, tmp_path: Path, level: int) -> None:
    result = compare(staged, dump_steps(sharded(level), tmp_path / "b"))
    assert result.first_divergence is None
    assert (result.only_a, result.only_b, result.noise) == ((), (), ())
    assert len(result.losses) == 2


def test_tied_weights_have_one_name_wherever_they_lie(tmp_path: Path) -> None:
    model = small_model(4, tied=True)
    a = dump_steps(in_two_stages(model, tied_owner=model.head_unit), tmp_path / "a")
    result = compare(a, dump_steps(in_unequal_shares(model), tmp_path / "b"))
    assert result.first_divergence is None
    assert (result.only_a, result.only_b) == ((), ())
    assert "step-1/gradient/0.token.weight" in {m.key for m in result.modules}


def test_a_wrong_scale_in_one_unit_of_one_rank_is_named(staged: Path, tmp_path: Path) -> None:
    wrong = scale_unit(2, 1.01, rank=1)
    result = compare(staged, dump_steps(in_unequal_shares(), tmp_path / "b", plant=wrong))
    first = result.first_divergence
    assert first is not None
    found = Key.parse(first.key)
    assert (found.step, found.kind, found.unit) == (1, "gradient", 2)
    of_step = [Key.parse(m.key) for m in result.modules if m.diverges]
    assert {key.unit for key in of_step if key.step == 1 and key.kind == "gradient"} == {2, None}


def test_what_ranks_left_is_a_side_of_the_command(staged: Path, tmp_path: Path) -> None:
    """As of a job on a cluster; the other side's was put together before."""
    pieces, page = staged.with_name("a-pieces"), tmp_path / "page.html"
    found = CliRunner().invoke(app, ["align", str(staged), str(pieces), "--html", str(page)])
    assert found.exit_code == 0, found.output
    text = " ".join(found.output.split())
    assert "2 steps of 6 sequences of 64 tokens, seed 0" in text
    assert "loss of steps 1 to 2: A 5." in text
    assert page.read_text().count("<polyline") == 2
    wrong = dump_steps(in_unequal_shares(), tmp_path / "b", plant=scale_unit(3, 2.0, rank=0))
    found = CliRunner().invoke(app, ["align", str(pieces), str(wrong)])
    assert found.exit_code == 1, found.output
    told = "first to diverge: step-1/gradient/3.mlp.down.weight (step 1, unit 3), relative L2"
    assert told in " ".join(found.output.split())


def test_a_rank_whose_pieces_are_missing_is_named(staged: Path, tmp_path: Path) -> None:
    pieces = tmp_path / "pieces"
    shutil.copytree(staged.with_name("a-pieces"), pieces)
    listed = pieces / "rank-1.jsonl"
    lines = listed.read_text().splitlines(keepends=True)
    listed.unlink()
    with pytest.raises(InputError, match="rank 1 has left nothing"):
        write_step_dump(pieces, tmp_path / "c", side="c")
    listed.write_text("".join(line for line in lines if '"step": 2' not in line))
    with pytest.raises(InputError, match=r"'step-2/gradient/5.*were left by no rank"):
        write_step_dump(pieces, tmp_path / "d", side="d")


def test_nothing_is_watched_unless_asked_for() -> None:
    plan = in_unequal_shares()
    assert plan.model.spec is not None
    spec = plan.model.spec
    watchers = World(2).run(lambda links: engine_of(plan, spec, links).watcher)
    assert watchers == [None, None]
