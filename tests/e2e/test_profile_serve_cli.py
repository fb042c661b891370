"""`tutti profile --serve` and `tutti bench steps` as a user types them; a tiny model."""

from __future__ import annotations

import json

import pytest

from tests.e2e.test_plan_cli import tutti
from tests.support.measured import measured_profile
from tutti.accelerator.profiling.cases import ProfileCase
from tutti.hardware.profile import Profile

HEADS = (4, 2, 16, 16)
CASES = [
    *(ProfileCase("linear", (rows, 64, 64), serves=True) for rows in (1, 8, 64)),
    *(ProfileCase("decode_attention", (rows, 64, *HEADS), serves=True) for rows in (1, 8)),
    ProfileCase("chunk_attention", (32, 1, *HEADS), serves=True),
    ProfileCase("sample", (4, 128), serves=True),
]


@pytest.fixture
def model(tmp_path):
    """A Llama of two layers."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "hidden_act": "silu",
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def tiny(monkeypatch, model):
    """A few shapes, one visit each: done long before any budget."""
    monkeypatch.setattr("tutti.accelerator.profiling.served_grid.served_cases", lambda: CASES)
    monkeypatch.setattr("tutti.accelerator.profiling.session.MOST_VISITS", 1)
    monkeypatch.setattr("tutti.accelerator.profiling.session.FIRST_SIDE", 64)
    monkeypatch.setattr("tutti.accelerator.profiling.session.LAST_SIDE", 64)
    monkeypatch.setattr("tutti.accelerator.profiling.workspace.HOST_ELEMENTS", 1 << 18)
    monkeypatch.setattr("tutti.accelerator.profiling.workspace.HOST_CACHE", 1)
    monkeypatch.setattr("tutti.accelerator.profiling.links.HOST_LARGE_BYTES", 1 << 20)
    monkeypatch.setattr("tutti.bench.served_gap.HOST_MODEL", model)


def test_a_server_is_profiled_and_its_steps_are_predicted(tiny, model, tmp_path, capsys):
    path = str(tmp_path / "cpu.json")
    arguments = ("--device", "cpu", "--budget", "10min", "--threads", "1")
    code, out, err = tutti(capsys, "profile", "--serve", "-o", path, *arguments)
    assert code == 0, err
    assert "decode_attention.inference fp32" in out
    found = Profile.load(tmp_path / "cpu.json")
    assert found.origin == "tutti profile --serve --budget 10min"
    assert not found.served_graphs
    code, out, err = tutti(
        capsys, "bench", "steps", model, "--profile", path, "--device", "cpu", "--rows", "3",
        "--longest", "256", "--layers", "2", "--as-measured", "--json",
    )  # fmt: skip
    assert code == 0, err
    said = json.loads(out)
    assert {step["chunk"] for step in said["steps"]} == {200}
    assert all(step["measured_s"] > 0 and step["predicted_s"] > 0 for step in said["steps"])


def test_a_profile_without_operators_of_servers_is_refused(model, tmp_path, capsys):
    path = tmp_path / "trained.json"
    measured_profile(chip="CPU").save(path)
    code, _, err = tutti(capsys, "bench", "steps", model, "--profile", str(path), "--device", "cpu")
    assert code == 2
    assert "holds no operators of servers; add them with tutti profile --serve --resume" in err
