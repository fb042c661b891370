"""A run begins with a Hugging Face folder and ends as one, under any plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.any_plan import Draft, level  # noqa: E402
from tests.support.checkpointing import Run, kept, run, whole  # noqa: E402
from tests.support.hf_models import saved, tiny_model  # noqa: E402
from tests.support.tiny_configs import tiny_config  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.huggingface import open_checkpoint  # noqa: E402
from tutti.huggingface.dtypes import BY_NAME  # noqa: E402
from tutti.models import load_model  # noqa: E402
from tutti.plan.files import refer_to_model  # noqa: E402
from tutti.plan.job import PRECISIONS, ScheduleKind  # noqa: E402
from tutti.plan.plan import Plan  # noqa: E402
from tutti.train.checkpoint import export_hf, load_hf  # noqa: E402


def plan_for(folder: Path, precision: str = "bf16", tp: int = 2, shard: int = 2) -> Plan:
    """Two stages: the first sliced, the second replicated and sharded."""
    spec = load_model(f"{folder}/")
    draft = Draft()
    draft.model = spec
    middle = spec.num_units // 2
    draft.line(
        (((0, middle),), [{"tp": tp, "sequences": 2}]),
        (((middle, spec.num_units),), [{"count": 2}]),
    )
    rule = level(shard, (0, spec.num_units))
    plan = draft.plan(ScheduleKind.ONE_F_ONE_B, *([rule] if shard else []))
    length = min(16, spec.max_length)
    job = replace(plan.job, precision=PRECISIONS[precision], sequence_length=length)
    owner = 0 if spec.ties_weights else None
    return replace(plan, model=refer_to_model(spec), job=job, tied_owner=owner)


MODELS = ["llama", "gpt2", "mixtral/4", "gpt_neox"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard", [0, 2])
def test_weights_in_and_out_are_the_same_bytes(name: str, shard: int, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(name), torch.bfloat16)
    source = saved(model, tmp_path / "hf")

    def work(one: Run) -> Any:
        load_hf(one.engine, source)
        one.save()
        return kept(one.engine)

    plan = plan_for(source, shard=shard)
    ranks = run(plan, tmp_path / "run", work, model_folder=source)
    ours = open_checkpoint(source)
    for key, value in whole(plan.model.spec, ranks).items():
        kind, _, tensor = key.partition("/")
        expected = ours.read(tensor).float() if kind == "weight" else torch.zeros(())
        assert torch.equal(value.float(), expected.expand_as(value)), key
    export_hf(tmp_path / "run", tmp_path / "out")
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype="auto"
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    expected = model.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for key, value in again.state_dict().items():
        assert value.dtype == expected[key].dtype
        assert torch.equal(value, expected[key]), key


def test_masters_hold_what_a_folder_in_float32_says(tmp_path: Path) -> None:
    source = saved(tiny_model(tiny_config("llama")), tmp_path / "hf")

    def work(one: Run) -> Any:
        load_hf(one.engine, source)
        return kept(one.engine)

    plan = plan_for(source)
    ours = open_checkpoint(source)
    state = whole(plan.model.spec, run(plan, tmp_path / "run", work))
    for name in ours.names():
        if ours.owner(name) == name:
            assert torch.equal(state[f"weight/{name}"], ours.read(name)), name


def test_trained_weights_come_out_as_they_are_and_rounded(tmp_path: Path) -> None:
    source = saved(tiny_model(tiny_config("llama")), tmp_path / "hf")

    def work(one: Run) -> Any:
        load_hf(one.engine, source)
        one.train(2)
        one.save()
        return kept(one.engine)

    plan = plan_for(source, "fp32", shard=0)
    state = whole(plan.model.spec, run(plan, tmp_path / "run", work))
    export_hf(tmp_path / "run" / "step-000002", tmp_path / "fp32", like=source)
    export_hf(tmp_path / "run", tmp_path / "bf16", like=source, dtype=BY_NAME["bfloat16"])
    exact, rounded = open_checkpoint(tmp_path / "fp32"), open_checkpoint(tmp_path / "bf16")
    before = open_checkpoint(source)
    for name in exact.names():
        value = state[f"weight/{exact.owner(name)}"]
        assert torch.equal(exact.read(name), value)
        assert torch.equal(rounded.read(name), value.bfloat16())
        assert not torch.equal(before.read(name), value), f"{name} was not trained"
    config = transformers.AutoConfig.from_pretrained(tmp_path / "bf16")
    assert config.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["llama", "mixtral/4"])
def test_training_in_8_bits_goes_to_a_bf16_folder_and_back_exactly(
    name: str, tmp_path: Path
) -> None:
    source = saved(tiny_model(tiny_config(name), torch.bfloat16), tmp_path / "hf")

    def work(one: Run) -> Any:
        load_hf(one.engine, source)
        one.train(2)
        one.save()
        return kept(one.engine)

    plan = plan_for(source, "fp8", shard=2)
    state = whole(plan.model.spec, run(plan, tmp_path / "run", work, model_folder=source))
    export_hf(tmp_path / "run", tmp_path / "out")
    before, found = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    moved = 0
    for tensor in found.names():
        assert found.dtype(tensor) == BY_NAME["bfloat16"]
        if found.owner(tensor) == tensor:
            master = state[f"weight/{tensor}"]
            assert torch.equal(found.read(tensor), master.to(torch.bfloat16)), tensor
            moved += not torch.equal(found.read(tensor), before.read(tensor))
    assert moved

    def back(one: Run) -> Any:
        load_hf(one.engine, tmp_path / "out")
        one.save()
        return kept(one.engine)

    run(plan, tmp_path / "again", back, model_folder=source)
    export_hf(tmp_path / "again", tmp_path / "same")
    same = open_checkpoint(tmp_path / "same")
    for tensor in found.names():
        assert torch.equal(same.read(tensor), found.read(tensor)), tensor


def test_the_first_loss_is_transformers_own(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("llama"))
    source = saved(model, tmp_path / "hf")
    plan = plan_for(source, "fp32")

    def work(one: Run) -> float:
        load_hf(one.engine, source)
        return one.train(1)[0]

    from tests.support.training import sample

    spec = plan.model.spec
    pairs = [sample(spec, 0, i, plan.job.sequence_length) for i in range(plan.job.global_batch)]
    tokens, targets = (torch.stack(list(column)) for column in zip(*pairs, strict=True))
    with torch.no_grad():
        logits = model(tokens).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert run(plan, tmp_path / "run", work)[0] == pytest.approx(float(expected), rel=1e-5)


def test_what_is_missing_for_an_export_is_one_line(tmp_path: Path) -> None:
    source = saved(tiny_model(tiny_config("llama")), tmp_path / "hf")

    def work(one: Run) -> None:
        load_hf(one.engine, source)
        one.save()

    run(plan_for(source), tmp_path / "run", work)
    with pytest.raises(InputError, match=r"has no config\.json of its model; name a folder"):
        export_hf(tmp_path / "run", tmp_path / "out")
    other = saved(tiny_model(tiny_config("gpt2")), tmp_path / "other")

    def mistaken(one: Run) -> None:
        with pytest.raises(InputError, match="differs from the planned"):
            load_hf(one.engine, other)

    run(plan_for(source), tmp_path / "run", mistaken)
