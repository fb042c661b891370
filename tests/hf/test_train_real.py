"""SmolLM2-135M, real weights, fine-tuned on conversations under two plans: one curve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from tests.support.launching import plan_of  # noqa: E402
from tutti.document import Place  # noqa: E402
from tutti.hardware.cluster import Cluster  # noqa: E402
from tutti.models.load import load_model  # noqa: E402
from tutti.plan.chips import ChipSet  # noqa: E402
from tutti.plan.plan import Plan, Replica  # noqa: E402
from tutti.train.run.result import TrainResult  # noqa: E402
from tutti.train.run.trainer import Trainer  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
CHAT = Path(__file__).parents[2] / "examples" / "train" / "chat.jsonl"
QUESTION = [{"role": "user", "content": "What does tutti mean?"}]


def cluster() -> Cluster:
    pools = [{"name": "cpu", "chip": "CPU", "chips_per_node": 2, "nodes": 1}]
    return Cluster.from_document({"name": "cores", "pools": pools}, Place("cores"))


def plans(folder: Path) -> dict[str, Plan]:
    """One chip that does everything; two stages with the tied embedding at both ends."""
    spec = load_model(str(folder))
    whole = Replica(chips=ChipSet.of("cpu/0/0"), sequences=2)
    other = Replica(chips=ChipSet.of("cpu/0/1"), sequences=2)
    return {
        "one chip": plan_of(cluster(), [[whole]], spec),
        "two stages": plan_of(cluster(), [[whole], [other]], spec, tied_owner=0),
    }


def tuned(folder: Path, plan: Plan, output: Path) -> TrainResult:
    trainer = Trainer.from_pretrained(
        folder,
        plan=plan,
        start="pretrained",
        output=str(output),
        steps=3,  # AdamW's first step hardly depends on the size of gradients
        data={"train": [{"path": str(CHAT)}], "cache": str(output.parent / "cache")},
        optimizer={"learning_rate": 1e-4, "schedule": "constant", "weight_decay": 0.0},
        timeout_s=900,
    )
    return trainer.fit()


def test_two_plans_one_curve_and_a_folder_for_transformers(smollm: Path, tmp_path: Path) -> None:
    results = {
        name: tuned(smollm, plan, tmp_path / name.replace(" ", "-"))
        for name, plan in plans(smollm).items()
    }
    for number, (name, result) in enumerate(results.items(), 1):
        figures = (result.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [json.loads(line) for line in figures]
        assert [step["pools"]["cpu"]["ranks"] for step in steps] == [number] * 3
        norms = [step["gradient_norm"] for step in steps]
        print(name, result.losses, norms, f"{result.seconds_per_step:.2f} s")
    first, second = results.values()
    assert first.losses == pytest.approx(second.losses, rel=1e-5)
    assert first.losses[2] < first.losses[1] < first.losses[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm)
    prompt = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    logits = []
    for where in (smollm, first.huggingface, second.huggingface):
        assert where is not None
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            where, dtype=torch.float32, output_loading_info=True
        )
        assert not loading["missing_keys"]
        assert not loading["unexpected_keys"]
        with torch.no_grad():
            logits.append(model(prompt).logits[0])
    before, one, two = logits
    moved = float((one - before).abs().max())
    assert moved > 1e-3  # it has learnt something,
    torch.testing.assert_close(one, two, rtol=0, atol=1e-2 * moved)  # under both plans the same
    assert (first.output / "huggingface" / "tokenizer.json").is_file()
