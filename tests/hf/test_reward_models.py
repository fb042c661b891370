"""Reward models in and out: transformers' classes of one label, peft's adapters, TRL's trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.hf_models import saved, tiny_model  # noqa: E402
from tests.support.tiny_configs import tiny_config  # noqa: E402
from tutti.accelerator import open_accelerator  # noqa: E402
from tutti.accelerator.reference.preference_losses import Answers  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.huggingface import open_checkpoint  # noqa: E402
from tutti.huggingface.conversion import convert  # noqa: E402
from tutti.models.load import load_model  # noqa: E402
from tutti.nn import Batch, Model, load  # noqa: E402
from tutti.recipes.reinforcement.reward_child import find_function  # noqa: E402
from tutti.recipes.reinforcement.reward_model import RewardModel, texts_of  # noqa: E402
from tutti.train.run.result import TrainResult  # noqa: E402
from tutti.train.run.trainer import Trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTHS = (7, 4, 9)
SCORED = ("llama/gqa", "qwen3", "mixtral/4", "gemma2", "gpt2", "gpt_neox", "falcon/new", "phi3")


def scored_folder(name: str, folder: Path, **more: Any) -> Any:
    """A tiny model of transformers with one label, and its folder."""
    torch.manual_seed(0)
    values: dict[str, Any] = {**tiny_config(name), "pad_token_id": 0, "num_labels": 1, **more}
    config = transformers.AutoConfig.for_model(**values)
    model = transformers.AutoModelForSequenceClassification.from_config(config).float().eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(0, 0.05)
    saved(model, folder)
    return model


def texts() -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(1, 100, (length,), generator=generator) for length in LENGTHS]


def theirs(model: Any) -> Any:
    with torch.no_grad():
        return torch.stack([model(input_ids=text[None]).logits[0, 0] for text in texts()])


def ours(folder: Path) -> Any:
    spec = load_model(str(folder))
    model = Model(spec, open_accelerator("cpu").operators)
    load(model, open_checkpoint(folder))
    tokens = torch.cat(texts())
    answers = Answers.of(None, [1.0] * 3, [0.0] * 3, tokens.device)
    batch = Batch.of(
        spec, tokens, list(LENGTHS), targets_t=torch.full_like(tokens, -100), answers=answers
    )
    with torch.no_grad():
        stream, _ = model.stream(None, batch)
        return model.head(stream, batch).logps_s


@pytest.mark.parametrize("name", SCORED)
def test_scores_are_transformers_and_the_folder_comes_back(name: str, tmp_path: Path) -> None:
    model = scored_folder(name, tmp_path / "model")
    assert (ours(tmp_path / "model") - theirs(model)).abs().max() < 1e-5
    convert(tmp_path / "model", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    name = "model.safetensors"
    assert (tmp_path / "model" / name).read_bytes() == (tmp_path / "back" / name).read_bytes()


def test_several_labels_are_refused(tmp_path: Path) -> None:
    values = {**tiny_config("llama/gqa"), "architectures": ["LlamaForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match="'num_labels' is 2; of models of whole texts only those"):
        load_model(str(tmp_path))
    values["id2label"] = {"0": "good"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert load_model(str(tmp_path)).head.scores


def pairs(folder: Path) -> Path:
    file = folder / "pairs.jsonl"
    rows = [
        {"prompt": f"{n} and {n}?", "chosen": "yes " * (1 + n % 3), "rejected": "no", "margin": 0.2}
        for n in range(24)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(folder: Path, output: Path, steps: int, *, fit: Any = None, **more: Any) -> TrainResult:
    trainer = Trainer.from_pretrained(
        folder,
        ranks=2,
        start="pretrained",
        steps=steps,
        output=str(output),
        data={
            "train": [str(pairs(folder))],
            "tokenizer": "bytes",
            "cache": str(output.parent / "cache"),
        },
        job={"global_batch": 4, "sequence_length": 64, "precision": "fp32"},
        objective={"kind": "reward", "centre": 0.01},
        checkpoints={"every": 2, "merged": True},
        optimizer={"learning_rate": 1e-2, "schedule": "constant"},
        **more,
    )
    return trainer.fit(**(fit or {}))


def base_folder(folder: Path) -> Path:
    return saved(tiny_model({**tiny_config("llama/gqa"), "vocab_size": 320}), folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_from_a_model_of_tokens_goes_on_and_its_folder_loads(tmp_path: Path) -> None:
    folder = base_folder(tmp_path / "model")
    first = run(folder, tmp_path / "run", 4)
    again = run(folder, tmp_path / "run", 8, fit={"resume": True})
    whole = run(folder, tmp_path / "other", 8)
    assert again.losses == whole.losses[4:]
    assert whole.losses[-1] < first.losses[0] - 0.1
    assert again.huggingface is not None
    model = transformers.AutoModelForSequenceClassification.from_pretrained(again.huggingface)
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert model.config.num_labels == 1
    assert (ours(Path(again.huggingface)) - theirs(model.float())).abs().max() < 1e-5
    further = run(Path(again.huggingface), tmp_path / "further", 1)
    assert further.losses[0] < first.losses[0] - 0.1, "a reward model's folder is gone on from"
    with pytest.raises(InputError, match="is a reward model and predicts no tokens"):
        Trainer.from_pretrained(again.huggingface, output=str(tmp_path / "no")).fit(steps=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_adapters_of_a_reward_model_load_in_peft_with_its_score(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = base_folder(tmp_path / "model")
    found = run(folder, tmp_path / "run", 4, tuning={"adapter": {"rank": 4, "alpha": 8}})
    assert found.adapter is not None
    assert found.huggingface is not None
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(found.huggingface)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    loaded = peft.PeftModel.from_pretrained(plain, str(found.adapter))
    plain.config.pad_token_id = 0
    difference = theirs(merged.float().eval()) - theirs(loaded.float().eval())
    assert difference.abs().max() < 1e-5


def test_a_reward_model_is_a_reward_of_whole_chats_and_texts(tmp_path: Path) -> None:
    model = scored_folder("llama/gqa", tmp_path / "model", vocab_size=320)
    reward = RewardModel(tmp_path / "model", tokenizer="bytes")
    prompt = "Is it? "
    found = reward(["yes", "", "certainly"], {"prompt": prompt})
    for score, answer in zip(found, ("yes", "", "certainly"), strict=True):
        ids = torch.tensor([texts_of(reward.tokenizer, prompt, answer)])
        with torch.no_grad():
            assert score == pytest.approx(float(model(input_ids=ids).logits), abs=1e-5)
    assert texts_of(reward.tokenizer, prompt, "yes")[1 : 1 + len(prompt)] == list(prompt.encode())
    with pytest.raises(ValueError, match="no field 'prompt' or 'messages'"):
        reward(["yes"], {"question": prompt})
    with pytest.raises(ValueError, match="is no reward model; train one"):
        RewardModel(base_folder(tmp_path / "base"))


def test_the_process_of_rewards_takes_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a folder; a reward model's is .*:score"):
        find_function(f"{tmp_path}:reward")
    with pytest.raises(ValueError, match=r"holds no config.json"):
        find_function(f"{tmp_path}:score")
