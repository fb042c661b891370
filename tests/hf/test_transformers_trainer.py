"""A script for transformers' Trainer runs on tutti, with the same losses, after one import."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tutti
from tests.support.hf_models import saved, tiny_model
from tests.support.tiny_configs import TINY
from tutti.errors import InputError
from tutti.ranks.local_processes import RankEvent
from tutti.train.run.planning import Job
from tutti.train.run.result import TrainResult
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


def short_rows() -> list[dict[str, Any]]:
    """Rows of several lengths, which would share rows if they were packed."""
    return [
        {name: value[: 5 + number] for name, value in row.items()}
        for number, row in enumerate(rows())
    ]


def arguments(folder: Path, **words: Any) -> Any:
    given: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": ROWS, "learning_rate": 1e-2,
        "lr_scheduler_type": "constant", "report_to": [], "use_cpu": True, "save_strategy": "no",
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **(given | words))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_model(dict(TINY["llama/gqa"])), tmp_path_factory.mktemp("base") / "base")


class Stops(transformers.TrainerCallback):
    """Ends the run after its second step, and keeps what it heard."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.until = 2

    def on_train_begin(self, args, state, control, **words) -> None:
        self.heard.append("begin")

    def on_log(self, args, state, control, logs=None, **words) -> None:
        self.heard.append(f"log {state.global_step}")

    def on_step_end(self, args, state, control, **words):
        if state.global_step >= self.until:
            control.should_training_stop = True  # who does not want to end says nothing
        return control


@pytest.mark.slow
def test_the_same_losses_and_weights(base: Path, tmp_path: Path) -> None:
    """All rows are in every step, so that no order of them matters; the rate rises and falls."""
    words = {"max_steps": 6, "lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_steps": 1}
    ours = Trainer(
        str(base), arguments(tmp_path / "ours", **words), train_dataset=short_rows(), ranks=1
    )
    found = ours.train()
    theirs = transformers.Trainer(
        transformers.AutoModelForCausalLM.from_pretrained(base),
        arguments(tmp_path / "theirs", **words), train_dataset=short_rows(),
        data_collator=padded,
    )  # fmt: skip
    theirs.train()
    logged = [line for line in theirs.state.log_history if "loss" in line]
    assert ours.result is not None
    assert list(ours.result.losses) == pytest.approx([line["loss"] for line in logged], abs=2e-4)
    rates = [line["learning_rate"] for line in ours.state.log_history]
    assert rates == pytest.approx([line["learning_rate"] for line in logged])
    assert found.global_step == 6
    for name, tensor in theirs.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], tensor, atol=2e-4, rtol=1e-3)


def padded(features: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of rows of several lengths, as transformers' own collators make it."""
    longest = max(len(one["input_ids"]) for one in features)

    def filled(values: list[int], what: int) -> list[int]:
        return [*values, *[what] * (longest - len(values))]

    ids, labels = ([one[name] for one in features] for name in ("input_ids", "labels"))
    return {
        "input_ids": torch.tensor([filled(one, 0) for one in ids]),
        "attention_mask": torch.tensor([filled([1] * len(one), 0) for one in ids]),
        "labels": torch.tensor([filled(one, -100) for one in labels]),
    }


@pytest.mark.slow
def test_callbacks_end_a_run_and_its_model_is_there(base: Path, tmp_path: Path) -> None:
    stops = Stops()
    trainer = Trainer(
        str(base), arguments(tmp_path / "out", max_steps=50, logging_steps=1),
        train_dataset=rows(), eval_dataset=rows(), callbacks=[stops], ranks=1,
    )  # fmt: skip
    found = trainer.train()
    assert 2 <= found.global_step < 50
    assert stops.heard[:3] == ["begin", "log 1", "log 2"]
    assert isinstance(trainer.model, transformers.LlamaForCausalLM)
    assert trainer.result is not None
    assert len(trainer.result.losses) == found.global_step
    assert trainer.result.finished
    assert trainer.config.steps == 50


class Runs:
    """In the place of ranks: its losses are the steps' numbers, and a held row is seen at each."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.made = 0

    def __call__(self, job: Job, *, listener: Any = None, **words: Any) -> TrainResult:
        self.asked.append(job.config.steps)
        first, ends = self.made, False
        while self.made < job.config.steps and not ends:
            self.made += 1
            words = {"step": self.made, "loss": self.made, "gradient_norm": 1, "learning_rate": 1}
            ends = listener(RankEvent(0, "step", words))
        made = range(first + 1, self.made + 1)
        done = self.made == job.config.steps
        return TrainResult(
            steps=self.made, losses=tuple(map(float, made)), seconds_per_step=0.5 * len(made),
            validation=tuple((n, n / 2) for n in made), tokens_per_s=8.0 * len(made),
            mfu=0.1 * len(made), predicted_s=None, output=job.config.folder, finished=done,
            checkpoint=Path(f"step-{self.made}"), huggingface=Path("model") if done else None,
            stopped_by="" if done else "SIGTERM",
        )  # fmt: skip


def test_an_ended_run_keeps_what_it_came_to_and_goes_on(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, stops = Runs(), Stops()
    monkeypatch.setattr("tutti.train.run.trainer.run_local", runs)
    trainer = Trainer(
        str(base), arguments(tmp_path / "out", max_steps=5), train_dataset=rows(),
        eval_dataset=rows(), callbacks=[stops], ranks=1,
    )  # fmt: skip
    found = trainer.train()
    assert (found.global_step, found.training_loss) == (2, 1.5)
    assert found.metrics["train_steps_per_second"] == 1.0
    assert trainer.evaluate() == {"eval_loss": 1.0, "epoch": 2.0, "step": 2}
    assert trainer.result is not None
    assert trainer.result.losses == (1.0, 2.0)
    assert (trainer.result.finished, trainer.result.stopped_by) == (True, "")
    assert trainer.result.huggingface == Path("model")
    assert trainer.config.steps == 5

    stops.until = 5
    assert trainer.train(resume_from_checkpoint=True).global_step == 5
    assert trainer.result.losses == (3.0, 4.0, 5.0)
    assert runs.asked == [5, 2, 5]


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
        dataloader_num_workers=0, logging_steps=7, seed=3, run_name="mine",
    )  # fmt: skip
    trainer = Trainer(str(base), args, train_dataset=rows(), eval_dataset=rows(), ranks=1)
    config = trainer.config
    assert trainer.ignored == ("run_name",)
    assert config.job.global_batch == 4
    assert config.steps == 6  # three times two steps of four rows
    assert (config.optimizer.weight_decay, config.optimizer.beta2) == (0.2, 0.9)
    assert (config.optimizer.schedule, config.optimizer.warmup_steps) == ("linear", 2)
    assert (config.validation.every, config.validation.steps, config.seed) == (5, 2, 3)


def keys(trainer: Trainer) -> dict[str, Any]:
    config = trainer.config
    return {
        "steps": config.steps,
        "save": config.checkpoints.every,
        "eval": config.validation.every,
        "warm": config.optimizer.warmup_steps,
        "share": config.optimizer.final_share,
        "decay": config.optimizer.decay_steps,
        "optimizer": config.optimizer.name,
        "seed": config.data.seed,
        "precision": config.job.precision,
    }


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ({"save_strategy": "epoch", "eval_strategy": "epoch"}, {"save": 3, "eval": 3, "steps": 9}),
        ({"save_strategy": "steps", "save_steps": 0.2}, {"save": 2}),
        ({"eval_strategy": "steps", "logging_steps": 4}, {"eval": 4}),
        ({"dataloader_drop_last": True}, {"steps": 6}),
        ({"num_train_epochs": 0.5}, {"steps": 2}),
        ({"max_steps": 5, "warmup_steps": 0.3}, {"steps": 5, "warm": 2}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 4}, {"warm": 0}),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}},
            {"share": 0.1},
        ),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 2, "decay_type": "linear"},
            },
            {"decay": 2},
        ),
        ({"optim": "adamw_bnb_8bit"}, {"optimizer": "adamw8bit"}),
        ({"optim": "adafactor"}, {"optimizer": "adafactor"}),
        ({"seed": 3, "data_seed": 9}, {"seed": 9}),
        ({"bf16": True}, {"precision": "bf16"}),
    ],
)
def test_typical_arguments_are_honoured(
    words: dict[str, Any], found: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    """Eight rows in batches of three: three steps an epoch, the last of them short."""
    usual = {"max_steps": -1, "per_device_train_batch_size": 3, "lr_scheduler_type": "linear"}
    args = arguments(tmp_path / "out", **(usual | words))
    trainer = Trainer(str(base), args, train_dataset=rows(), eval_dataset=rows(), ranks=1)
    assert trainer.ignored == ()
    assert {name: keys(trainer)[name] for name in found} == pytest.approx(found)


BEST: dict[str, Any] = {
    "load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps",
    "eval_steps": 2, "save_steps": 2,
}  # fmt: skip


@pytest.mark.slow
def test_the_best_model_is_the_scripts_own_at_the_end(base: Path, tmp_path: Path) -> None:
    """Rows of no meaning are learnt by heart: the loss on others rises."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    args = arguments(
        tmp_path / "out",
        max_steps=8,
        learning_rate=3e-2,
        warmup_steps=8,
        save_total_limit=1,
        **BEST,
    )
    trainer = Trainer(model, args, train_dataset=rows(), eval_dataset=other_rows(), ranks=1)
    assert trainer.model is model
    trainer.train()
    told = trainer.result.validation if trainer.result is not None else ()
    lowest = min(loss for _, loss in told)
    assert told[-1][1] > lowest
    assert trainer.evaluate()["eval_loss"] == lowest
    assert trainer.model is model
    assert held_loss(model) == pytest.approx(lowest, abs=2e-4)
    trainer.save_model(tmp_path / "saved")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert held_loss(saved) == pytest.approx(lowest, abs=2e-4)


def other_rows() -> list[dict[str, Any]]:
    """Rows that nothing is trained on."""
    draw = torch.Generator().manual_seed(9)
    ids = torch.randint(1, 60, (4, LENGTH), generator=draw).tolist()
    return [{"input_ids": one, "labels": one} for one in ids]


def held_loss(model: Any) -> float:
    batch = padded(other_rows())
    with torch.no_grad():
        return float(model.eval()(**batch).loss)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 would change the result"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 would change the result"),
        ({"optim": "adagrad"}, "optim='adagrad' is not there; known: adamw_torch"),
        ({"optim": "sgd", "weight_decay": 0.1}, "weight_decay=0.1 would change the result"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type='polynomial' is not there"),
        ({"save_strategy": "best"}, "save_strategy='best' would change the result"),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 2},
            },
            "tutti's last steps are linear",
        ),
        (
            {**BEST, "metric_for_best_model": "accuracy"},
            "metric_for_best_model='accuracy' would change the result",
        ),
        (
            {**BEST, "greater_is_better": True},
            "greater_is_better=True would change the result",
        ),
    ],
)  # fmt: skip
def test_what_would_change_the_result_is_refused(
    words: dict[str, Any], said: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        Trainer(str(base), arguments(tmp_path / "out", **words), train_dataset=rows(), ranks=1)


def test_a_collator_of_ones_own_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'data_collator' len would change the result"):
        Trainer(str(base), arguments(tmp_path / "o"), train_dataset=rows(), data_collator=len)


class _Tokens:
    pad_token_id = 0


def test_collators_for_causal_models_are_understood(base: Path, tmp_path: Path) -> None:
    collator = transformers.DataCollatorForLanguageModeling.__new__(
        transformers.DataCollatorForLanguageModeling
    )
    collator.tokenizer, collator.mlm = _Tokens(), False
    given = [
        {"input_ids": torch.tensor([5, 6, 0, 0]), "attention_mask": torch.tensor([1, 1, 1, 0])}
    ]
    trainer = Trainer(
        str(base), arguments(tmp_path / "o"), collator, given * 4, ranks=1, sequence_length=8
    )
    assert trainer._rows[0] == {
        "input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 1, 0], "labels": [5, 6, -100, -100]
    }  # fmt: skip


def test_a_stream_is_read_as_far_as_it_is_trained_on(base: Path, tmp_path: Path) -> None:
    endless = (row for row in itertools.cycle(rows()))
    trainer = Trainer(str(base), arguments(tmp_path / "o"), train_dataset=endless, ranks=1)
    assert len(trainer._rows) == STEPS * ROWS
    with pytest.raises(InputError, match="'train_dataset' has no length; give max_steps"):
        Trainer(
            str(base), arguments(tmp_path / "o", max_steps=-1), train_dataset=iter(rows()), ranks=1
        )


def test_what_is_not_there_says_what_is(base: Path, tmp_path: Path) -> None:
    trainer = Trainer(str(base), arguments(tmp_path / "o"), train_dataset=rows(), ranks=1)
    with pytest.raises(AttributeError, match=r"has no 'predict'; it has .*evaluate"):
        trainer.predict(rows())
    with pytest.raises(InputError, match=r"nothing is trained yet.*tutti evaluate"):
        trainer.evaluate()
    assert trainer.is_world_process_zero()
    with pytest.raises(InputError, match="resume_from_checkpoint is 'last'"):
        trainer.train(resume_from_checkpoint="last")
