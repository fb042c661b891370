"""A script for transformers' Trainer runs on tutti, with the same losses, after one import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tutti
from tests.support.hf_models import saved, tiny_model
from tests.support.tiny_configs import TINY
from tutti.errors import InputError
from tutti.transformers import Trainer

LENGTH, ROWS, STEPS = 16, 8, 3
pytestmark = pytest.mark.filterwarnings("ignore")


def rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(1, 60, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    return [
        {"input_ids": a, "labels": b} for a, b in zip(ids.tolist(), labels.tolist(), strict=True)
    ]


def arguments(folder: Path, **words: Any) -> Any:
    given: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": ROWS, "learning_rate": 1e-2,
        "lr_scheduler_type": "constant", "report_to": [], "use_cpu": True, "save_strategy": "no",
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **(given | words))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return saved(tiny_model(dict(TINY["llama/gqa"])), tmp_path / "base")


@pytest.mark.slow
def test_the_same_losses_and_weights(base: Path, tmp_path: Path) -> None:
    """All rows are in every step, so that no order of them matters."""
    ours = Trainer(str(base), arguments(tmp_path / "ours"), train_dataset=rows(), ranks=1)
    found = ours.train()
    theirs = transformers.Trainer(
        transformers.AutoModelForCausalLM.from_pretrained(base),
        arguments(tmp_path / "theirs", logging_steps=1), train_dataset=rows(),
        data_collator=transformers.default_data_collator,
    )  # fmt: skip
    theirs.train()
    losses = [line["loss"] for line in theirs.state.log_history if "loss" in line]
    assert ours.result is not None
    assert list(ours.result.losses) == pytest.approx(losses, abs=2e-4)  # theirs are rounded
    assert found.global_step == STEPS
    for name, tensor in theirs.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], tensor, atol=2e-4, rtol=1e-3)


@pytest.mark.slow
def test_rows_of_a_program_train(base: Path, tmp_path: Path) -> None:
    trainer = tutti.Trainer.from_pretrained(
        base, steps=2, output=str(tmp_path / "out"), ranks=1,
        job={"sequence_length": LENGTH, "global_batch": 4, "precision": "fp32"},
    )  # fmt: skip
    result = trainer.fit(iter(rows()))
    assert result.steps == 2
    assert isinstance(result.model(), transformers.LlamaForCausalLM)


def test_arguments_become_a_training_file(base: Path, tmp_path: Path) -> None:
    args = arguments(
        tmp_path / "out", max_steps=-1, num_train_epochs=3, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, weight_decay=0.2, warmup_steps=2, adam_beta2=0.9,
        lr_scheduler_type="linear", eval_strategy="steps", eval_steps=5, torch_compile=False,
        dataloader_num_workers=0, logging_steps=7, seed=3,
    )  # fmt: skip
    trainer = Trainer(str(base), args, train_dataset=rows(), eval_dataset=rows(), ranks=1)
    config = trainer.config
    assert trainer.ignored == ("logging_steps",)
    assert config.job.global_batch == 4
    assert config.steps == 6  # three times two steps of four rows
    assert (config.optimizer.weight_decay, config.optimizer.beta2) == (0.2, 0.9)
    assert (config.optimizer.schedule, config.optimizer.warmup_steps) == ("linear", 2)
    assert (config.validation.every, config.seed) == (5, 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 would change the result"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 would change the result"),
        ({"optim": "adafactor"}, "optim='adafactor' is not there; known: adamw_torch"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type='polynomial' is not there"),
    ],
)
def test_what_would_change_the_result_is_refused(
    words: dict[str, Any], said: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        Trainer(str(base), arguments(tmp_path / "out", **words), train_dataset=rows(), ranks=1)


def test_a_collator_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'data_collator' would change the result"):
        Trainer(str(base), arguments(tmp_path / "o"), train_dataset=rows(), data_collator=len)
