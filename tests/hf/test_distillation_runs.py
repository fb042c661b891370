"""Whole runs with a teacher: told as it goes or earlier, resumed, and held against a plain loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.hf_models import saved, tiny_model  # noqa: E402
from tests.support.tiny_configs import tiny_config  # noqa: E402
from tutti.cost.arrays import Shape  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.models.flops import matmul_parameters, unit_operators  # noqa: E402
from tutti.models.load import load_model  # noqa: E402
from tutti.models.operators import Workload  # noqa: E402
from tutti.train.run.result import TrainResult  # noqa: E402
from tutti.train.run.trainer import Trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def folders(place: Path) -> tuple[Path, Path]:
    """A small student and a deeper teacher of another family."""
    student = saved(tiny_model({**tiny_config("llama/gqa"), "vocab_size": 128}), place / "student")
    teacher = tiny_config("qwen3") | {"vocab_size": 128}
    model = tiny_model(teacher)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(3.0)
    return student, saved(model, place / "teacher")


def trainer(student: Path, output: Path, distillation: dict[str, Any], **more: Any) -> Trainer:
    return Trainer.from_pretrained(
        student,
        start="pretrained",
        output=str(output),
        data={"train": [{"kind": "synthetic"}], "cache": str(output.parent / "cache")},
        job={"global_batch": 4, "sequence_length": 16, "precision": "fp32"},
        distillation=distillation,
        checkpoints={"every": 2},
        optimizer={"learning_rate": 1e-2, "schedule": "constant"},
        **{"steps": 4, **more},
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_told_before_is_told_as_it_goes_and_a_resumed_run_is_the_run(tmp_path: Path) -> None:
    student, teacher = folders(tmp_path)
    how = {"teacher": str(teacher), "top_k": 8, "temperature": 2.0, "share": 0.8}

    def run(name: str, ranks: int, steps: int, *, stored: bool, **fit: Any) -> TrainResult:
        given = trainer(student, tmp_path / name, how | {"stored": stored}, ranks=ranks)
        return given.fit(steps=steps, **fit)

    live = run("live", 1, 6, stored=False)
    kept = run("kept", 2, 6, stored=True)
    assert kept.losses == pytest.approx(live.losses, abs=2e-5)
    assert live.losses[-1] < live.losses[0]
    run("parts", 2, 4, stored=True)
    assert run("parts", 2, 6, stored=True, resume=True).losses == kept.losses[4:]
    assert (tmp_path / "kept" / "teacher" / "told.json").is_file()
    assert live.huggingface is not None
    transformers.AutoModelForCausalLM.from_pretrained(live.huggingface)


def test_a_teacher_that_cannot_teach_is_refused_before_anything_starts(tmp_path: Path) -> None:
    student, teacher = folders(tmp_path)
    how = {"teacher": str(teacher)}
    for given, line in (
        ({"teacher": "llama-3-8b"}, "the teacher's vocabulary has 128256 tokens, the model's 128"),
        ({**how, "top_k": 128}, "'top_k' is 128 of 128 tokens"),
        ({"teacher": str(tmp_path / "none")}, "none"),
    ):
        with pytest.raises(InputError, match=line):
            trainer(student, tmp_path / "run", given).prepare()
    with pytest.raises(InputError, match="'distillation' is a loss of tokens, objective dpo"):
        trainer(student, tmp_path / "run", how, objective={"kind": "dpo"})
    with pytest.raises(InputError, match="a teacher is not brought to the ranks that are left"):
        trainer(student, tmp_path / "run", how, elastic={})


def test_a_teacher_beside_the_head_is_priced(tmp_path: Path) -> None:
    student, teacher = folders(tmp_path)
    plain = trainer(student, tmp_path / "a", {"teacher": str(teacher)}, ranks=1).prepare()
    stored = {"teacher": str(teacher), "stored": True, "top_k": 4}
    kept = trainer(student, tmp_path / "b", stored, ranks=1).prepare()
    moving = [job.predicted().memory[0].moving for job in (plain, kept)]
    held = load_model(str(teacher)).num_parameters * 4
    assert moving[0] - moving[1] == pytest.approx(held, rel=0.05)


def test_what_a_teacher_computes_is_the_heads_forward() -> None:
    spec, large = load_model("llama-3.2-1b"), load_model("llama-3-8b")
    taught = replace(spec, taught=True, teacher=large)
    assert taught.fingerprint == spec.fingerprint, "a plan is good with and without"
    work = Workload(sequences=1, sequence_length=512)
    own, more = (unit_operators(one, one.head_unit, work) for one in (spec, taught))
    whole = [op for unit in range(large.num_units) for op in unit_operators(large, unit, work)]
    added = sum(op.forward.flops for op in more) - sum(op.forward.flops for op in own)
    assert added == pytest.approx(sum(op.forward.flops for op in whole), rel=0.01)
    assert sum(op.backward.flops for op in more) == sum(op.backward.flops for op in own)
    assert sum(k.bytes for op in more for k in op.kept) == sum(k.bytes for o in own for k in o.kept)
    share = float(Shape.of(taught, 0).answers)
    assert share == pytest.approx(matmul_parameters(large) / (spec.vocab * spec.hidden))
