"""Log-likelihoods of choices are transformers', by the serving engine and under a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.any_plan import PLANS
from tests.support.hf_models import saved, tiny_model
from tests.support.threads import World
from tests.support.tiny_configs import TINY
from tests.support.training import engine_of, in_fp32
from tutti.accelerator import open_accelerator
from tutti.huggingface.tokenizer import ByteTokenizer
from tutti.nn.batch import Batch
from tutti.nn.initialize import initialize
from tutti.nn.model import Model
from tutti.recipes.evaluation import evaluate_folder, folder_logps
from tutti.serve import Engine
from tutti.train.data.feeder import Feeder
from tutti.train.engine.samples import sample_indices
from tutti.train.evaluation.config import TaskConfig
from tutti.train.evaluation.rows import item_logps
from tutti.train.evaluation.tasks import Scored, open_task


def questions(path: Path) -> TaskConfig:
    lines = [
        {"context": f"The number {i} and", "choices": [" one", " many more", "no"], "answer": i % 3}
        for i in range(6)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return TaskConfig(path=str(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**TINY["llama/gqa"], "vocab_size": 260}
    return saved(tiny_model(config), tmp_path_factory.mktemp("model"))


def test_choices_are_as_likely_as_by_transformers(folder: Path, tmp_path: Path) -> None:
    import transformers

    config = questions(tmp_path / "task.jsonl")
    task = open_task(config, ByteTokenizer(), longest=64)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = []
    for item in task.items:
        ids = torch.tensor([item.tokens])
        with torch.no_grad():
            logps = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        own = logps.gather(1, ids[0, 1:, None])[:, 0]
        expected.append(float(own[item.first - 1 :].sum()))
    engine = Engine.from_pretrained(folder, tokenizer="bytes", dtype="fp32", device="cpu")
    found = folder_logps(engine, task, lambda *_: None)
    assert found == pytest.approx(expected, abs=1e-4)
    figures = evaluate_folder(
        folder, [config], tokenizer="bytes", dtype="fp32", device="cpu", max_length=64
    )
    assert figures == {"task": task.figures(found)}


@pytest.mark.parametrize("name", ["context parallel, zero bubble"])
def test_under_a_plan(name: str) -> None:
    plan = in_fp32(PLANS[name], "sgd")
    spec = plan.model.spec
    assert spec is not None
    numbers = torch.Generator().manual_seed(3)
    items = []
    for size in (3, 9, 5, 7, 2, 12, 6):
        tokens = torch.randint(spec.vocab, (size,), generator=numbers).tolist()
        items.append(Scored(tokens=tuple(tokens), first=1 + size // 3, num_bytes=size))
    model = Model(spec, open_accelerator("cpu").operators)
    initialize(model, seed=1, deviation=0.1)
    expected = []
    for item in items:
        tokens = torch.tensor(item.tokens)
        with torch.no_grad():
            logps = model.logits(Batch.of(spec, tokens, [len(tokens)])).float().log_softmax(-1)
        own = logps[:-1].gather(1, tokens[1:, None])[:, 0]
        expected.append(float(own[item.first - 1 :].sum()))
    told: list[Any] = []
    world = World(plan.num_ranks)

    def one(links: Any) -> list[float]:
        engine = engine_of(plan, spec, links)
        seat = engine.seat

        def feed(samples: Any, first: int, last: int, answers: Any) -> Feeder:
            return Feeder(
                samples, spec, engine.accelerator,
                lambda step, m: sample_indices(plan, seat, step, m),
                micro_batches=plan.pipelines[seat.place.pipeline].micro_batches,
                context=(seat.replica.cp, seat.place.cp), first_step=first, last_step=last,
                answers=answers,
            )  # fmt: skip

        return item_logps(engine, feed, _Threads(links, plan.num_ranks, told), items)

    for found in world.run(one):
        assert found == pytest.approx(expected, abs=1e-4)


class _Threads:
    """Ranks as threads that tell each other values."""

    def __init__(self, links: Any, size: int, told: list[Any]) -> None:
        self.rank, self.size, self._links, self._told = links.rank, size, links, told

    def gather(self, value: Any) -> list[Any] | None:
        everything: list[Any] = self._links._meet(range(self.size), value)()
        return everything if self.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        return self._links._meet(range(self.size), value)()[0]
