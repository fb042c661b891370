"""Losses on answers and their gradients are TRL's, where TRL is installed (`pip install trl`)."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.hf_models import saved, tiny_model
from tests.support.tiny_configs import TINY
from tutti.accelerator import open_accelerator
from tutti.accelerator.reference.preference_losses import Answers
from tutti.huggingface import open_checkpoint
from tutti.models.load import load_model
from tutti.models.objective import Objective
from tutti.nn import Batch, Model, load
from tutti.nn.batch import NO_TARGET

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl", exc_type=ImportError)
    datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.filterwarnings("ignore")
PAIRS, LENGTH, BETA = 3, 14, 0.3


def tokens() -> tuple[Tensor, Tensor]:
    """Return chosen answers, then rejected ones, with a prompt of two to four tokens each."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 60, (2 * PAIRS, LENGTH), generator=generator)
    mask = torch.zeros_like(ids)
    for i in range(2 * PAIRS):
        mask[i, 2 + i % PAIRS :] = 1
    return ids, mask


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model, and a reference of other weights."""
    model = tiny_model(dict(TINY["llama/gqa"]))
    first = saved(model, tmp_path_factory.mktemp("model"))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(
                0.02 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
            )
    return first, saved(model, tmp_path_factory.mktemp("reference"))


def transformers_model(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logps(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    found = model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
    picked = found.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (picked * mask[:, 1:]).sum(1)


def ours(
    folder: Path,
    objective: Objective,
    references: Tensor,
    order: list[int],
    weights: list[float],
    baseline: float = 0.0,
) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss and the gradients by tutti; all answers are packed into one row."""
    ids, mask = tokens()
    spec = load_model(str(folder))
    model = Model(spec, open_accelerator("cpu").operators)
    load(model, open_checkpoint(folder))
    targets = torch.full_like(ids, NO_TARGET)
    targets[:, :-1] = torch.where(mask[:, 1:] > 0, ids[:, 1:], NO_TARGET)
    answers = Answers.of(objective, weights, references[order].tolist(), torch.device("cpu"))
    answers = replace(answers, baseline=baseline)
    batch = Batch.of(
        spec, ids[order].reshape(-1), [LENGTH] * len(order),
        targets_t=targets[order].reshape(-1), answers=answers,
    )  # fmt: skip
    loss = model(None, batch).loss / answers.count
    loss.backward()
    return float(loss.detach()), {
        "embed": model.embedding.token.weight.grad, "head": model.head.logits.weight.grad,
    }  # fmt: skip


def close(found: tuple[float, dict[str, Tensor]], loss: Tensor, model: Any) -> None:
    loss.backward()
    assert found[0] == pytest.approx(float(loss.detach()), abs=1e-5)
    theirs = {
        "embed": model.get_input_embeddings().weight.grad,
        "head": model.get_output_embeddings().weight.grad,
    }
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, theirs[name], atol=1e-5, rtol=1e-4)
        assert gradient.abs().max() > 1e-4


def trainer_of(kind: str, config: Any, folders: tuple[Path, Path], tmp_path: Path) -> Any:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(60)}
    raw = Tokenizer(models.WordLevel(words, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="w1", pad_token="w0"
    )
    row: dict[str, Any] = {"prompt": "w2 w3"}
    row |= (
        {"chosen": "w4", "rejected": "w5"} if kind == "DPO" else {"completion": "w4", "label": True}
    )
    table = datasets.table.InMemoryTable.from_pylist([row, dict(row)] * 2)
    data = datasets.Dataset(table, fingerprint="given")  # nothing of it is read
    made = getattr(trl, f"{kind}Trainer")
    made._prepare_dataset = lambda self, dataset, *others: dataset  # tokens are given to the loss
    return made(
        transformers_model(folders[0]), transformers_model(folders[1]),
        args=config, train_dataset=data, processing_class=tokenizer,
    )  # fmt: skip


PAIRED = [i for pair in zip(range(PAIRS), range(PAIRS, 2 * PAIRS), strict=True) for i in pair]


@pytest.mark.parametrize("kind", ["dpo", "hinge", "ipo"])
def test_dpo(kind: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    config = trl.DPOConfig(
        output_dir=str(tmp_path), beta=BETA, loss_type={"dpo": "sigmoid"}.get(kind, kind),
        use_cpu=True, report_to=[], bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = trainer_of("DPO", config, folders, tmp_path)
    ids, mask = tokens()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}
    loss = trainer._compute_loss(trainer.model, inputs, False)
    references = logps(transformers_model(folders[1]), ids, mask).detach()
    objective = Objective(kind=kind, beta=BETA)  # type: ignore[arg-type]
    found = ours(folders[0], objective, references, PAIRED, [1.0, -1.0] * PAIRS)
    close(found, loss, trainer.model)


def test_kto(folders: tuple[Path, Path], tmp_path: Path) -> None:
    config = trl.KTOConfig(
        output_dir=str(tmp_path), beta=BETA, desirable_weight=1.5, use_cpu=True, report_to=[],
        bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = trainer_of("KTO", config, folders, tmp_path)
    ids, mask = tokens()
    labels = [True, False, True, True, False, False]
    other = ids.roll(1, 0)
    inputs = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask,
        "KL_input_ids": other, "KL_attention_mask": torch.ones_like(ids),
        "KL_completion_mask": mask, "label": torch.tensor(labels),
    }  # fmt: skip
    loss = trainer._compute_loss(trainer.model, inputs, False)
    policy, reference = (transformers_model(folder) for folder in folders)
    with torch.no_grad():
        references = logps(reference, ids, mask)
        ratios = logps(policy, other, mask) - logps(reference, other, mask)
    objective = Objective(kind="kto", beta=BETA, desirable_weight=1.5)
    weights = [1.0 if wanted else -1.0 for wanted in labels]
    baseline = max(0.0, float(ratios.mean()))
    found = ours(folders[0], objective, references, list(range(2 * PAIRS)), weights, baseline)
    close(found, loss, trainer.model)


@pytest.mark.parametrize("kind", ["orpo", "simpo"])
def test_without_a_reference(kind: str, folders: tuple[Path, Path]) -> None:
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    ids, mask = tokens()
    model = transformers_model(folders[0])
    labels = torch.where(mask > 0, ids, -100)
    theirs = ORPOTrainer if kind == "orpo" else CPOTrainer
    means = theirs.get_batch_logps(model(input_ids=ids).logits, labels, average_log_prob=True)
    chosen, rejected = means.chunk(2)
    settings = SimpleNamespace(
        beta=BETA, accelerator=SimpleNamespace(device="cpu"), alpha=0.0, loss_type="simpo",
        simpo_gamma=0.4, label_smoothing=0.0,
    )  # fmt: skip
    if kind == "orpo":  # the loss of answers is a mean of each: no batch changes it
        loss = (-chosen - ORPOTrainer.odds_ratio_loss(settings, chosen, rejected)[0]).mean()
    else:
        loss = CPOTrainer.cpo_loss(settings, chosen, rejected)[0].mean()
    objective = Objective(
        kind=kind,
        beta=BETA,
        margin=0.4 if kind == "simpo" else None,  # type: ignore[arg-type]
    )
    found = ours(folders[0], objective, torch.zeros(2 * PAIRS), PAIRED, [1.0, -1.0] * PAIRS)
    close(found, loss, model)
