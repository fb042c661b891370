"""The Hugging Face side records every module and gradient of every model type by our names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.hf_models import saved, tiny_model  # noqa: E402
from tests.support.slow_types import with_slow  # noqa: E402
from tests.support.tiny_configs import TINY, tiny_config  # noqa: E402
from tutti.huggingface.alignment_sides import Task, write_dump  # noqa: E402
from tutti.huggingface.comparison import compare  # noqa: E402
from tutti.huggingface.dumps import Batch, Dump  # noqa: E402
from tutti.models import load_model  # noqa: E402

# Their scores of experts are so close that in bfloat16 some tokens choose or weigh other ones.
OTHER_EXPERTS = ("deepseek_v2/grouped", "olmoe/gqa", "phimoe", "phimoe/long")


def dump(folder: Path, target: Path, dtype: str = "float32") -> Dump:
    spec = load_model(f"{folder}/")
    batch = Batch.seeded(spec, sequences=2, length=12, seed=0)
    task = Task(folder=folder, spec=spec, batch=batch, dtype=dtype, device="cpu", gradients=True)
    write_dump("hf", task, target)
    return Dump(target)


@pytest.mark.parametrize("name", with_slow(TINY))
def test_every_gradient_arrives_under_our_names(name: str, tmp_path: Path) -> None:
    folder = saved(tiny_model(tiny_config(name)), tmp_path / "hf")
    found = dump(folder, tmp_path / "dump")
    spec = load_model(f"{folder}/")
    wanted = {
        f"gradient/{unit}.{parameter.name}": parameter.shape
        for unit in range(spec.num_units)
        for parameter in spec.parameters(unit)
        if parameter.trainable and parameter.tied_to is None
    }
    got = {k: r.shape for k, r in found.tensors.items() if k.startswith("gradient/")}
    assert got == wanted
    forward = [key for key in found.tensors if key.startswith("forward/")]
    for unit in range(1, spec.num_layers + 1):
        at = [forward.index(f"forward/{unit}{part}") for part in (".attention", ".mlp", "")]
        assert at == sorted(at), "in the order of execution"
    assert forward[0] == "forward/0"
    assert forward[-2:] == ["forward/logits", "forward/loss"]
    whole = sum(float(np.sum(found.numbers(key) ** 2)) for key in got)
    assert whole == pytest.approx(_gradient_norm(folder, found), rel=1e-4)
    # other numerics of the same model: within what its format allows
    dump(folder, tmp_path / "bf16", "bfloat16")
    result = compare(tmp_path / "dump", tmp_path / "bf16")
    assert result.worst.relative_l2 > 1e-3, "bfloat16 was really used"
    assert (result.first_divergence is None) == (name not in OTHER_EXPERTS), result.worst


def _gradient_norm(folder: Path, found: Dump) -> float:
    """Return the squared norm of all gradients as transformers has them in memory."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.from_numpy(found.numbers("input/tokens").astype(np.int64).reshape(2, 12))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return sum(float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None)
