"""`tutti convert` and `tutti align` as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.checkpoints import snapshot, stored_tensors, write_folder, write_tensors
from tutti.cli.main import run


def tutti(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("tutti")), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=cwd,
    )


def test_there_and_back(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf")
    done = tutti("convert", source, "-o", tmp_path / "ours")
    assert done.returncode == 0, done.stderr
    assert "llama: 21 tensors" in done.stdout
    assert "(tutti folder)" in done.stdout
    done = tutti("convert", tmp_path / "ours", "-o", tmp_path / "back", "--json")
    result = json.loads(done.stdout)
    assert result["form"] == "hf"
    assert result["files"]["model.safetensors"]["bytes"] == (
        (source / "model.safetensors").stat().st_size
    )
    assert snapshot(tmp_path / "back") == snapshot(source)


def test_errors_are_one_line(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf")
    (tmp_path / "there").mkdir()
    write_tensors(
        write_folder(tmp_path / "short") / "model.safetensors",
        dict(list(stored_tensors().items())[:-1]),
    )
    for arguments, said in [
        ((source, "-o", tmp_path / "there"), "exists already"),
        ((source, "-o", tmp_path / "x", "--to", "onnx"), "--to is 'onnx'; known: hf, tutti"),
        ((source, "-o", tmp_path / "x", "--dtype", "bf8"), "--dtype is 'bf8'; known: bf16"),
        ((tmp_path / "no.gguf", "-o", tmp_path / "x"), "no.gguf: "),
        ((tmp_path / "short", "-o", tmp_path / "x"), "'lm_head.weight' is missing; expected [64,"),
        ((source / "config.json", "-o", tmp_path / "x"), "config.json: is a file; name a folder"),
        ((tmp_path / "none", "-o", tmp_path / "x"), "no such folder"),
    ]:
        done = tutti("convert", *arguments)
        assert done.returncode == 2, said
        assert len(done.stderr.splitlines()) == 1
        assert said in done.stderr
        assert not (tmp_path / "x").exists()


def test_help_stays_without_torch() -> None:
    script = (
        "import sys; from tutti.cli.main import run\n"
        "try: run(['convert', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


# --- with torch and transformers -------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Here = Callable[..., Done]


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Here:
    """Return the command line in this process: importing transformers takes seconds."""

    def tutti(*arguments: object) -> Done:
        with pytest.raises(SystemExit) as stopped:
            run(list(map(str, arguments)))
        out, err = capsys.readouterr()
        return Done(int(stopped.value.code or 0), out, err)

    return tutti


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders, `a` and `b`, that differ in one weight of block 2's feed-forward layer."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**LLAMA)
    )
    model.save_pretrained(folder / "a")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] += 1
    model.save_pretrained(folder / "b")
    return folder


def test_rounding_to_another_format(models: Path, tmp_path: Path, here: Here) -> None:
    import torch
    from safetensors.torch import load_file

    done = here("convert", models / "a", "-o", tmp_path / "bf16", "--dtype", "bf16")
    assert done.returncode == 0, done.stderr
    done = here("convert", tmp_path / "bf16", "-o", tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    before = load_file(models / "a" / "model.safetensors")
    after = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(after) == set(before)
    assert all(torch.equal(after[k], before[k].to(torch.bfloat16)) for k in before)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_dumps_and_their_comparison(models: Path, tmp_path: Path, here: Here) -> None:
    for name in "ab":
        done = here("align", "dump", models / name, "-o", tmp_path / name, "--length", "8")
        assert done.returncode == 0, done.stderr
    done = here("align", tmp_path / "a", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    assert "no divergence in" in done.stdout
    page = tmp_path / "page.html"
    done = here("align", tmp_path / "a", tmp_path / "b", "--html", page)
    assert done.returncode == 1
    assert "first to diverge: forward/2.mlp" in done.stdout
    assert "2.mlp" in page.read_text()
    done = here("align", tmp_path / "a", tmp_path / "b", "--json")
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert result["first_divergence"] == "forward/2.mlp"
    assert not any(m["diverges"] for m in result["modules"] if m["key"].startswith("forward/1"))
    done = here("align", tmp_path / "a", tmp_path / "b", "--tolerance", "1e3")
    assert done.returncode == 0


def test_folders_are_run_where_no_dump_is(models: Path, here: Here) -> None:
    arguments = ("--dtype", "fp32", "--dtype", "bf16", "--length", "8", "--no-gradients")
    done = here("align", models / "a", models / "a", *arguments)
    assert done.returncode == 0, done.stderr
    assert "A hf float32" in done.stdout
    assert "B hf bfloat16" in done.stdout
    assert "gradient" not in done.stdout.replace("modules and gradients", "")


def test_what_cannot_be_aligned(models: Path, tmp_path: Path, here: Here) -> None:
    here("convert", models / "a", "-o", tmp_path / "ours")
    for arguments, said in [
        ((models, models), "holds no dump.json"),
        (("dump", tmp_path / "ours", "-o", tmp_path / "x"), "is a tutti folder"),
        (("dump", models / "a", "-o", tmp_path / "x", "--side", "jax"), "--side is 'jax'"),
        (("dump", models / "a", "-o", tmp_path / "x", "--dtype", "int4"), "--dtype is 'int4'"),
        ((models / "a", models / "a", "--tolerance", "nan"), "--tolerance is nan"),
    ]:
        done = here("align", *arguments)
        assert done.returncode == 2, done.stdout
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert said in done.stderr
        assert not (tmp_path / "x").exists()
