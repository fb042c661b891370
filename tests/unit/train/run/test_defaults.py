"""What a job is where nothing is said: its precision, its ranks, and what it says beforehand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tutti.cli.train import asked
from tutti.document import Place, build, plain
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.hardware.discover import discover
from tutti.hardware.local import local_cluster
from tutti.models.tuning import AdapterSpec, Tuning
from tutti.plan.job import Precision
from tutti.train.run import planning
from tutti.train.run.config import AUTO, JobConfig, TrainConfig
from tutti.train.run.planning import cluster_of, default_precision, notices, prepare

GPT2 = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 259,
    "n_positions": 64,
}  # fmt: skip


def cpu_host() -> Cluster:
    return discover(run=lambda _: "").cluster


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TUTTI_DEVICE", raising=False)
    monkeypatch.setattr(planning, "local_cluster", lambda ranks: local_cluster(ranks, cpu_host()))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text(json.dumps(GPT2))
    return tmp_path


def config(**keys: Any) -> TrainConfig:
    base = {"model": "tiny", "data": {"train": [{"kind": "synthetic"}]}}
    few = {"offload": False, "recompute": False}  # a small space to search
    job = {"sequence_length": 32, "global_batch": 4, **few, **keys.pop("job", {})}
    return build(TrainConfig, {**base, "job": job, **keys}, Place("test"))


@pytest.mark.parametrize(
    ("cluster", "bf16", "wanted"),
    [
        ("cpu", False, "fp32"),
        ("cpu", True, "bf16"),
        ("small-mixed", False, "bf16"),  # accelerators compute, whatever the host is
        ("laptop", False, "bf16"),  # emulated chips keep their declared time
    ],
)
def test_the_default_precision(
    cluster: str, bf16: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TUTTI_DEVICE", raising=False)
    found = cpu_host() if cluster == "cpu" else Cluster.load(cluster)
    assert default_precision(found, JobConfig(), lambda: bf16) == wanted


def test_a_run_that_is_made_to_use_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_DEVICE", "cpu")
    cluster = Cluster.load("small-mixed")
    assert default_precision(cluster, JobConfig(), lambda: False) == "fp32"


def test_pools_that_are_left_out_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text(
        "name: both\npools:\n  - {name: gpu, chip: A800, chips_per_node: 8}\n"
        "  - {name: host, node: CPU-host}\n"
    )
    both = Cluster.load(str(file))
    assert default_precision(both, JobConfig(), lambda: False) == "fp32"
    assert default_precision(both, JobConfig(pools=("gpu",)), lambda: False) == "bf16"


@pytest.mark.parametrize(
    ("bf16", "given", "compute", "says"),
    [
        (False, AUTO, "fp32", True),
        (True, AUTO, "bf16", False),
        (False, "bf16", "bf16", False),  # an explicit one is obeyed, without a word
        (False, "fp32", "fp32", False),
    ],
)
def test_precision_is_said_where_it_was_chosen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, bf16: bool, given: str, compute: str, says: bool
) -> None:
    monkeypatch.setattr(planning.default_precision, "__defaults__", (lambda: bf16,))
    job = prepare(config(job={"precision": given}))
    found: Precision = job.plan.job.precision
    assert found.compute == compute
    said = [line for line in notices(job) if line.startswith("precision: fp32")]
    assert bool(said) is says


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_of_this_machine(folder: Path, ranks: int) -> None:
    """All of them take part, and the machine is described as it is."""
    job = prepare(config(ranks=ranks, job={"global_batch": 6}))
    assert job.plan.num_ranks == ranks
    (pool,) = job.cluster.pools
    assert pool.node.host == cpu_host().pools[0].node.host


def test_ranks_do_not_go_with_a_cluster(folder: Path) -> None:
    with pytest.raises(InputError, match=r"ranks: 2 of this machine .* the cluster is 'laptop'"):
        cluster_of(config(ranks=2, cluster="laptop"))


def options(**given: Any) -> TrainConfig:
    nothing = dict.fromkeys(("plan", "model", "data", "steps", "output"))
    return asked(given.pop("config", None), **{**nothing, "changes": [], **given})


def test_a_folder_and_a_number_are_enough(folder: Path) -> None:
    found = options(config=Path("tiny"), ranks=2)
    assert (found.model, found.cluster, found.ranks) == ("tiny", "here", 2)
    (folder / "train.yaml").write_text(
        "model: tiny\ncluster: laptop\ndata: {train: ['shipped:tales'], tokenizer: bytes}\n"
    )
    found = options(config=Path("train.yaml"), ranks=3)  # the option comes before the file
    assert (found.cluster, found.ranks) == ("here", 3)
    with pytest.raises(InputError, match="the plan says how many"):
        options(config=Path("train.yaml"), ranks=3, plan=Path("plan.json"))
    with pytest.raises(InputError, match="are two models"):
        options(config=Path("tiny"), model="gpt2")


# --- dropout ---------------------------------------------------------------------------------


def test_dropout_of_a_config_is_said(folder: Path) -> None:
    """GPT-2 has 0.1 where its config.json says nothing."""
    lines = [line for line in notices(prepare(config())) if "dropout" in line]
    assert lines == [
        "dropout of the model's config (attention 0.1, residual 0.1, embedding 0.1) is not "
        "applied: tutti trains without (--set dropout=0 says that this is meant)"
    ]
    assert not [line for line in notices(prepare(config(dropout=0))) if "dropout" in line]
    none = {**GPT2, "attn_pdrop": 0.0, "resid_pdrop": 0, "embd_pdrop": None}
    (folder / "tiny/config.json").write_text(json.dumps(none))
    assert not [line for line in notices(prepare(config())) if "dropout" in line]


def test_noise_of_a_router_is_said(folder: Path) -> None:
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 259,
        "num_local_experts": 4,
    }  # fmt: skip
    mixtral = {**sizes, "model_type": "mixtral"}
    for values, noisy in (
        ({**sizes, "model_type": "phimoe"}, 1),
        (mixtral, 0),
        ({**mixtral, "router_jitter_noise": 0.1}, 1),
    ):
        (folder / "tiny/config.json").write_text(json.dumps(values))
        lines = [line for line in notices(prepare(config())) if "noise" in line]
        assert len(lines) == noisy, values


def test_dropout_that_is_asked_for_is_refused() -> None:
    with pytest.raises(InputError, match=r"'dropout' is 0.1, but tutti trains without dropout"):
        config(dropout=0.1)


def test_few_bits_say_that_they_save_no_time(folder: Path) -> None:
    tuning = Tuning(adapter=AdapterSpec(rank=2), base="nf4")
    lines = [line for line in notices(prepare(config(tuning=plain(tuning)))) if "base" in line]
    assert lines == [
        "base: nf4 saves memory, not time: no chip here multiplies by such weights, so each "
        "product makes its own wide again"
    ]
    wide = replace(tuning, base="wide")
    assert not [line for line in notices(prepare(config(tuning=plain(wide)))) if "base" in line]
