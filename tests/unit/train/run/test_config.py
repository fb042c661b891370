"""The training file: what it says, what it may not say, from where its paths are meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.plans import small_model
from tests.support.tiny_configs import tiny_config
from tutti.document import Place, build
from tutti.errors import InputError
from tutti.models import read_config
from tutti.models.spec import ModelSpec
from tutti.train.run.config import TrainConfig, with_changes
from tutti.train.run.planning import trained

LEAST = {"model": "gpt2", "data": {"train": [{"kind": "synthetic"}]}}


def config(**more: object) -> TrainConfig:
    return build(TrainConfig, {**LEAST, **more}, Place("train.yaml"))


def written(folder: Path, text: str) -> Path:
    path = folder / "train.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"step": 10}, "did you mean 'steps'?"),
        ({"optimizer": {"lr": 1e-4}}, "train.yaml: optimizer: unknown key 'lr'"),
        ({"steps": 0}, "steps"),
        ({"optimizer": {"schedule": "cosinus"}}, "did you mean 'cosine'?"),
        ({"optimizer": {"learning_rate": 0}}, "learning_rate"),
        ({"start": "scratch"}, "start"),
        ({"measure": {"prometheus_port": 70_000}}, "prometheus_port"),
        ({"data": {"train": []}}, "'train' is empty"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_what_a_file_may_not_say(more: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as caught:
        config(**more)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paths_are_seen_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "cluster.yaml").touch()
    path = written(
        tmp_path,
        "model: my-model\ncluster: cluster.yaml\n"
        "data: {train: [texts/*.txt, 'shipped:tales', /elsewhere/x.txt], tokenizer: bytes}\n",
    )
    found = TrainConfig.load(path)
    assert found.model == str(tmp_path / "my-model")
    assert found.cluster == str(tmp_path / "cluster.yaml")
    assert [source.path for source in found.data.train] == [
        str(tmp_path / "texts/*.txt"),
        "shipped:tales",
        "/elsewhere/x.txt",
    ]
    assert found.data.tokenizer == "bytes"
    assert found.output == "out/train"  # of whoever runs it, not beside the file


def test_names_of_the_catalogs_stay(tmp_path: Path) -> None:
    path = written(tmp_path, "model: gpt2\ncluster: laptop\ndata: {train: [{kind: synthetic}]}\n")
    found = TrainConfig.load(path)
    assert (found.model, found.cluster) == ("gpt2", "laptop")


def test_profiles_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.json").touch()
    found = config(job={"chip_profiles": ["own.json", "h200"]}).with_whole_profile_paths()
    assert found.job.chip_profiles == (str(tmp_path / "own.json"), "h200")


def test_changes_reach_inside() -> None:
    changes = ["optimizer.learning_rate=1e-4", "steps=7", "job.micro_batch=[1, 2]"]
    found = with_changes(config(), {"output": "elsewhere"}, changes)
    assert found.optimizer.learning_rate == 1e-4
    assert found.steps == 7
    assert found.job.micro_batch == (1, 2)
    assert found.output == "elsewhere"
    assert found.data == config().data


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("steps", "write key=value"),
        ("steps.most=3", "'steps' has no keys inside"),
        ("optimiser.learning_rate=1", "did you mean 'optimizer'?"),
        ("steps=many", "steps"),
    ],
)
def test_wrong_changes_are_one_line(change: str, said: str) -> None:
    with pytest.raises(InputError, match=r"options|--set") as caught:
        with_changes(config(steps=3), {}, [change])
    assert said in str(caught.value)


def test_a_change_keeps_what_was_not_named() -> None:
    before = config(steps=3, optimizer={"warmup_steps": 2}, seed=5)
    after = with_changes(before, {"steps": 4})
    assert after == with_changes(after, {})
    assert (after.steps, after.optimizer.warmup_steps, after.seed) == (4, 2, 5)


def test_on_and_off_are_words_though_yaml_reads_them_otherwise(tmp_path: Path) -> None:
    text = "model: gpt2\ndata: {train: [{kind: synthetic}]}\ncapture: off\nbalance_loss: on\n"
    found = TrainConfig.load(written(tmp_path, text))
    assert (found.capture, found.balance_loss) == ("off", "on")
    assert with_changes(found, {}, ["capture=on"]).capture == "on"


def test_what_is_trained_is_the_models_choice_or_the_jobs() -> None:
    spec = read_config(
        {**tiny_config("qwen3_moe"), "pad_token_id": 7, "output_router_logits": True}, "tiny"
    )

    def balanced(found: ModelSpec) -> set[bool]:
        return {block.moe.router.balance_loss_on for block in found.blocks if block.moe}

    assert trained(spec, config()) == spec
    assert spec.embedding.padding == 7
    assert balanced(spec) == {True}
    other = trained(spec, with_changes(config(), {}, ["balance_loss=off", "padding_row=trained"]))
    assert other.embedding.padding is None
    assert balanced(other) == {False}
    assert trained(other, config(balance_loss="on")) == spec.with_training(padding=True)
    assert other.fingerprint == spec.fingerprint, "one plan serves them all"


def test_there_may_be_no_balancing_loss_to_switch_on() -> None:
    spec = small_model(2)
    with pytest.raises(InputError, match="small: its config has no coefficient"):
        trained(spec, config(balance_loss="on"))
    assert trained(spec, config(balance_loss="off")) == spec
