"""`tutti align` as it is typed: complete help, and errors that call the sides by their names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from tutti.cli.main import app, run

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.hf_models import saved, tiny_model

SMALL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


def tutti(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        run(arguments)
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


def test_help_explains_the_short_form(capsys: pytest.CaptureFixture[str]) -> None:
    """`tutti align -h` has every argument and option of `tutti align A B`, and the other verb."""
    code, out, _ = tutti(["align", "-h"], capsys)
    assert code == 0
    assert out.startswith("Usage: tutti align [OPTIONS] A B")
    group = typer.main.get_command(app).commands["align"]  # type: ignore[attr-defined]
    for parameter in group.commands["compare"].params:
        option = max(parameter.opts, key=len)
        assert re.search(rf"^  .*{re.escape(option)}\b", out, re.M), option
    assert re.search(r"^  dump ", out, re.M)
    assert not re.search(r"/tmp|/var|\.venv", out)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    desk = tmp_path_factory.mktemp("align")
    saved(tiny_model(SMALL), desk / "one")
    saved(tiny_model({**SMALL, "hidden_size": 64}), desk / "other")
    return desk


def test_errors_call_sides_by_what_was_typed(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(desk)
    code, _, err = tutti(
        ["align", "one", "other", "--side", "tutti", "--no-gradients", "--length", "8"], capsys
    )
    assert code == 2
    assert err.startswith("tutti: other: is of another model: one ran 'one' (llama, ")
    assert "tmp" not in err
    code, _, err = tutti(["align", "one", "nowhere", "--side", "tutti", "--length", "8"], capsys)
    assert code == 2
    assert err.startswith("tutti: nowhere: ")
    code, _, err = tutti(["align", "meta-llama/Llama-3-8B", "one", "--side", "tutti"], capsys)
    assert code == 2
    assert "nothing is downloaded" in err
