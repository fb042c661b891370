"""GRPO and RLOO as a user runs them: processes, rewards of a file, resumed, and bad rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tutti.document import Place, build
from tutti.errors import TuttiError
from tutti.recipes.catalog import copy, find
from tutti.train.run.config import TrainConfig
from tutti.train.run.trainer import Trainer

pytestmark = pytest.mark.slow


def config_of(folder: Path, output: str, **words: Any) -> TrainConfig:
    sampling = {"rewards": [f"{folder}/rewards.py:digits"], "group": 4, "max_tokens": 8}
    written = {
        "model": str(folder / "tiny-model"),
        "cluster": "here",
        "ranks": 1,
        "data": {"train": [str(folder / "prompts.jsonl")], "tokenizer": "bytes"},
        "job": {"sequence_length": 64, "global_batch": 8, "precision": "fp32"},
        "objective": {"kind": "grpo", "beta": 0.02, "sampling": sampling},
        "optimizer": {"learning_rate": 1e-2, "weight_decay": 0},
        "steps": 4,
        "output": str(folder / output),
        **words,
    }
    return build(TrainConfig, written, Place("test"))


def sampled(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [found["sampled"] for line in lines if "sampled" in (found := json.loads(line))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy(find("grpo"), tmp_path)
    return tmp_path


def test_two_ranks_are_one(folder: Path) -> None:
    alone = Trainer(config_of(folder, "alone")).fit()
    both = Trainer(config_of(folder, "both", ranks=2)).fit()
    assert both.losses == pytest.approx(alone.losses, abs=1e-4)
    rewards = [[one["reward"] for one in sampled(run.output)] for run in (alone, both)]
    assert rewards[1] == pytest.approx(rewards[0], abs=1e-6)  # the same answers, to the token


def test_a_resumed_run_goes_on_as_it_would_have(folder: Path) -> None:
    steady = {"learning_rate": 1e-2, "weight_decay": 0, "schedule": "constant"}
    alone = Trainer(config_of(folder, "alone", steps=3, optimizer=steady)).fit()
    Trainer(config_of(folder, "cut", steps=2, optimizer=steady)).fit()
    resumed = Trainer(config_of(folder, "cut", steps=3, optimizer=steady)).fit(resume=True)
    assert resumed.losses == pytest.approx(alone.losses[2:], abs=1e-5)


def test_rloo_with_adapters_and_several_updates(folder: Path) -> None:
    objective = {
        "kind": "rloo", "beta": 0.05,
        "sampling": {"rewards": [f"{folder}/rewards.py:digits"], "group": 4, "max_tokens": 8,
                     "updates": 2},
    }  # fmt: skip
    config = config_of(
        folder, "rloo", objective=objective, tuning={"adapter": {"rank": 4, "alpha": 8}}
    )
    result = Trainer(config).fit()
    assert result.finished
    assert result.adapter is not None
    found = sampled(result.output)
    assert found[0]["reward"] == found[1]["reward"] != found[2]["reward"]  # a batch, two steps


TWO_POOLS = """
name: two
chips:
  - {name: CPU-new, vendor: emulated, emulated: true, slowdown: 2, peak: {fp32: 40 GFLOP/s},
     memory_bytes: 4 GiB, memory_bandwidth: 4 GB/s, launch_overhead_s: 20 us, architecture: core}
  - {name: CPU-old, base: CPU-new, slowdown: 4, peak: {fp32: 20 GFLOP/s}, architecture: core}
nodes:
  - name: one-new
    chip: CPU-new
    num_chips: 1
    host: {cores: 2, memory_bytes: 16 GiB, memory_bandwidth: 16 GB/s, device_bandwidth: 4 GB/s,
           numa_nodes: 1}
  - {name: one-old, base: one-new, chip: CPU-old}
pools:
  - {name: new, node: one-new}
  - {name: old, node: one-old}
fabric:
  links:
    - {pools: [new, old], bandwidth: 1 GB/s, latency_s: 50 us, same_host: true}
"""


def test_a_pool_that_only_answers_one_batch_ahead(folder: Path) -> None:
    cluster = folder / "two.yaml"
    cluster.write_text(TWO_POOLS)
    objective = {
        "kind": "grpo", "beta": 0.02,
        "sampling": {"rewards": [f"{folder}/rewards.py:digits"], "group": 4, "max_tokens": 8,
                     "answering": ["old"]},
    }  # fmt: skip
    config = config_of(
        folder, "apart", objective=objective, cluster=str(cluster), ranks=None, steps=4,
        validation={"every": 3}, data={
            "train": [str(folder / "prompts.jsonl")], "tokenizer": "bytes", "holdout": 0.05,
        },
    )  # fmt: skip
    said: list[str] = []
    result = Trainer(config).fit(
        listener=lambda event: said.append(str(event.values.get("text", "")))
    )
    assert result.finished
    assert len(result.validation) == 1
    assert any(line.startswith("old answer in") and "new train in" in line for line in said)
    found = sampled(result.output)
    assert len(found) == 4
    assert all("wait_s" in one for one in found)
    assert found[0]["divergence"] == pytest.approx(0.0, abs=1e-5)  # nothing has moved yet
    # the first batch was drawn by the weights it is trained with; the sampler's figures are the
    # trainer's, so that nothing is clipped
    assert found[0]["clipped"] == 0.0


def test_groups_with_bad_rewards_are_left_out_or_end_the_run(folder: Path) -> None:
    (folder / "rewards.py").write_text(
        "import random, time\n"
        "calls = 0\n"
        "def digits(answers, record):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls % 2:\n"
        "        raise RuntimeError('odd')\n"
        "    return [float(len(text)) for text in answers]\n"
    )
    said: list[str] = []
    result = Trainer(config_of(folder, "left", steps=2)).fit(
        listener=lambda event: said.append(str(event.values.get("text", "")))
    )
    assert result.finished
    assert sum(one["left_out"] for one in sampled(result.output)) >= 1
    assert said.count("rewards: RuntimeError: odd: the group is left out") == 1
    sampling = {"rewards": [f"{folder}/rewards.py:digits"], "group": 4, "max_tokens": 8,
                "bad_rewards": "error"}  # fmt: skip
    with pytest.raises(TuttiError, match="rewards: RuntimeError: odd; mend it"):
        Trainer(config_of(folder, "ends", objective={"kind": "grpo", "sampling": sampling})).fit()


def test_rewards_that_tell_nothing_apart_are_said(folder: Path) -> None:
    """Once at first and once at the third batch in a row, with a figure in every step's record."""
    (folder / "rewards.py").write_text(
        "def digits(answers, record):\n    return [0.25] * len(answers)\n"
    )
    said: list[str] = []
    result = Trainer(config_of(folder, "alike")).fit(
        listener=lambda event: said.append(str(event.values.get("text", "")))
    )
    lines = [line for line in said if "worth the same (0.25)" in line]
    assert ["in this batch" in line for line in lines] == [True, False]
    assert "for 3 batches in a row" in lines[1]
    assert [one["alike"] for one in sampled(result.output)] == [1.0] * 4
