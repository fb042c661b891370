"""Files that follow a plan hold the same numbers, and a rank finds its slices in few of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoints import LLAMA, snapshot, write_folder
from tutti.errors import InputError
from tutti.huggingface import layout
from tutti.huggingface.conversion import convert
from tutti.huggingface.folders import open_checkpoint
from tutti.huggingface.pieces import whole
from tutti.huggingface.tensor_file import TensorFile
from tutti.models import read_config
from tutti.plan.chips import ChipSet
from tutti.plan.files import refer_to_model
from tutti.plan.job import Job
from tutti.plan.plan import ClusterReference, ExpertGroup, Pipeline, Plan, Replica, Stage

MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_hidden_layers": 2,
}


def stage(units: tuple[int, int], tp: int, experts: tuple[ExpertGroup, ...] = ()) -> Stage:
    chips = ChipSet.of(f"a/0/0-{tp - 1}")
    return Stage(units=(units,), replicas=(Replica(chips=chips, tp=tp),), experts=experts)


def plan_of(config: dict[str, object], *pipelines: tuple[Stage, ...]) -> Plan:
    return Plan(
        model=refer_to_model(read_config(config, "model")),
        cluster=ClusterReference(name="any"),
        job=Job(sequence_length=8, global_batch=len(pipelines)),
        pipelines=tuple(Pipeline(micro_batch=1, micro_batches=1, stages=s) for s in pipelines),
    )


def check_same(source: Path, target: Path) -> None:
    theirs, ours = open_checkpoint(source), open_checkpoint(target)
    for name in theirs.names():
        shape = theirs.parameter(name).shape
        bounds = whole(shape)
        assert np.array_equal(theirs.raw(name, bounds), ours.raw(name, bounds)), name
        odd = tuple((size // 3, size - size // 4) for size in shape)
        assert np.array_equal(theirs.raw(name, odd), ours.raw(name, odd)), name


def test_slices_for_stages_of_unlike_degrees(tmp_path: Path) -> None:
    """Two pipelines cut the model differently; their degrees 2 and 4 need four slices."""
    source = write_folder(tmp_path / "hf")
    plan = plan_of(
        LLAMA, (stage((0, 2), 2), stage((2, 4), 1)), (stage((0, 3), 4), stage((3, 4), 1))
    )
    convert(source, tmp_path / "ours", plan=plan)
    names = sorted(p.name for p in (tmp_path / "ours").glob("*.safetensors"))
    assert names == [
        *("units-0-1-slice-0-of-4.safetensors", "units-0-1-slice-1-of-4.safetensors"),
        *("units-0-1-slice-2-of-4.safetensors", "units-0-1-slice-3-of-4.safetensors"),
        *("units-0-1.safetensors", "units-2-2-slice-0-of-4.safetensors"),
        *("units-2-2-slice-1-of-4.safetensors", "units-2-2-slice-2-of-4.safetensors"),
        *("units-2-2-slice-3-of-4.safetensors", "units-2-2.safetensors", "units-3-3.safetensors"),
    ]
    last = TensorFile(tmp_path / "ours" / "units-0-1-slice-3-of-4.safetensors")
    assert "1.attention.query.weight[24:32]" in last.entries
    assert "1.mlp.gate.weight[36:48]" in last.entries
    # two key-value heads make two pieces, which stand where the slices that share them begin
    assert not any("attention.key" in key for key in last.entries)
    check_same(source, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)


def test_experts_are_cut_where_chips_share_them(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", MIXTRAL)
    groups = (ExpertGroup(chips=2, experts=(5, 3)),), (ExpertGroup(chips=4),)
    plan = plan_of(MIXTRAL, (stage((0, 4), 2, groups[0]),), (stage((0, 4), 4, groups[1]),))
    convert(source, tmp_path / "ours", plan=plan)
    files = {p.name for p in (tmp_path / "ours").glob("*experts*")}
    assert files == {
        f"units-0-3-experts-{first}-{last}.safetensors"
        for first, last in ((0, 1), (2, 3), (4, 4), (5, 5), (6, 7))
    }
    check_same(source, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "units", form="tutti")  # and into another layout
    check_same(source, tmp_path / "units")
    convert(tmp_path / "units", tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)


def test_large_units_are_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MOST_FILE_BYTES", 10_000)
    source = write_folder(tmp_path / "hf")
    convert(source, tmp_path / "ours")
    names = {p.name for p in (tmp_path / "ours").glob("unit-1-*")}
    assert len(names) > 2
    check_same(source, tmp_path / "ours")


def test_a_plan_for_another_model(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf")
    plan = plan_of({**LLAMA, "intermediate_size": 64}, (stage((0, 4), 1),))
    with pytest.raises(InputError, match="--plan: the plan is for 'model' with the hash"):
        convert(source, tmp_path / "ours", plan=plan)
    with pytest.raises(InputError, match="a Hugging Face folder follows no plan"):
        convert(source, tmp_path / "ours", plan=plan, form="hf")
