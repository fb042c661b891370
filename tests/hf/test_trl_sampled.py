"""Losses on sampled answers, their gradients and advantages are TRL's, where TRL is installed."""

from __future__ import annotations

import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.hf_models import saved, tiny_model
from tests.support.tiny_configs import TINY
from tutti.accelerator import open_accelerator
from tutti.accelerator.reference.sampled_answers import SampledAnswers
from tutti.huggingface import open_checkpoint
from tutti.models.load import load_model
from tutti.models.objective import Objective
from tutti.models.sampling import Sampling
from tutti.nn import Batch, Model, load
from tutti.nn.batch import NO_TARGET
from tutti.recipes.reinforcement.advantages import group_advantages, left_out_advantages

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore")
ANSWERS, PROMPT, LENGTH, BETA = 6, 3, 12, 0.2
SAMPLING = Sampling(rewards=("a:b",), clip=0.2, clip_high=0.28)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_model(dict(TINY["llama/gqa"])), tmp_path_factory.mktemp("model"))


def given() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, which of the answers' tokens count, advantages, noise on log-probabilities."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 60, (ANSWERS, LENGTH), generator=generator)
    mask = torch.ones(ANSWERS, LENGTH - PROMPT)
    for i in range(ANSWERS):
        mask[i, 3 + i :] = 0
    advantages = torch.randn(ANSWERS, generator=generator)
    return ids, mask, advantages, torch.randn(2, ANSWERS, LENGTH - PROMPT, generator=generator)


def of_transformers(model: Any, ids: Tensor) -> Tensor:
    found = model(input_ids=ids).logits[:, PROMPT - 1 : -1].float().log_softmax(-1)
    return found.gather(-1, ids[:, PROMPT:, None]).squeeze(-1)


def theirs(kind: str, folder: Path) -> tuple[float, dict[str, Tensor], Tensor, Tensor]:
    """TRL's own `_compute_loss`, with what a trainer holds of it."""
    import transformers

    ids, mask, advantages, noise = given()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logps = of_transformers(model, ids)
    old, reference = logps.detach() + 0.1 * noise[0], logps.detach() + 0.3 * noise[1]
    trainer = SimpleNamespace(
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level="token", beta=BETA, loss_type="grpo", use_vllm=False,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None),
        epsilon_low=SAMPLING.clip, epsilon_high=SAMPLING.highest, _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (logps, torch.zeros_like(logps), None),
    )  # fmt: skip
    inputs = {
        "prompt_ids": ids[:, :PROMPT], "prompt_mask": torch.ones(ANSWERS, PROMPT),
        "completion_ids": ids[:, PROMPT:], "completion_mask": mask, "advantages": advantages,
        "old_per_token_logps": old, "ref_per_token_logps": reference,
        "old_logps": (old * mask).sum(1),
    }  # fmt: skip
    made = trl.GRPOTrainer if kind == "grpo" else trl.RLOOTrainer
    loss = made._compute_loss(trainer, model, inputs)
    loss.backward()
    gradients = {
        "embed": model.get_input_embeddings().weight.grad,
        "head": model.get_output_embeddings().weight.grad,
    }
    return float(loss.detach()), gradients, old, reference


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_loss_and_gradients(kind: str, folder: Path) -> None:
    loss, gradients, old, reference = theirs(kind, folder)
    ids, mask, advantages, _ = given()
    spec = load_model(str(folder))
    model = Model(spec, open_accelerator("cpu").operators)
    load(model, open_checkpoint(folder))
    targets = torch.full_like(ids, NO_TARGET)
    targets[:, PROMPT - 1 : -1] = torch.where(mask > 0, ids[:, PROMPT:], NO_TARGET)
    wide = torch.zeros(2, ANSWERS, LENGTH)
    wide[0, :, PROMPT - 1 : -1], wide[1, :, PROMPT - 1 : -1] = old, reference
    answers = SampledAnswers.of(
        Objective(kind=kind, beta=BETA, sampling=SAMPLING),  # type: ignore[arg-type]
        advantages.tolist(), [True] * ANSWERS, tokens=ids.numel(), device=torch.device("cpu"),
        old=wide[0].reshape(-1), old_sums=(old * mask).sum(1).tolist(),
        reference=wide[1].reshape(-1),
    )  # fmt: skip
    batch = Batch.of(
        spec, ids.reshape(-1), [LENGTH] * ANSWERS, targets_t=targets.reshape(-1), answers=answers
    )
    found = model(None, batch).loss / answers.count
    found.backward()
    assert float(found.detach()) == pytest.approx(loss, abs=1e-5)
    own = {"embed": model.embedding.token.weight.grad, "head": model.head.logits.weight.grad}
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, gradients[name], atol=1e-5, rtol=1e-4)
        assert gradient.abs().max() > 1e-4


def test_advantages() -> None:
    from trl.trainer.utils import nanstd

    rewards = torch.rand(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    apart = torch.rand(5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mean, deviation = rewards.mean(1, keepdim=True), nanstd(rewards, dim=1)[:, None]
    grpo = group_advantages(rewards.numpy(), normalise=True)
    np.testing.assert_allclose(grpo, (rewards - mean) / (deviation + 1e-4), rtol=1e-6)
    net = rewards - BETA * apart  # the lines of RLOOTrainer._generate_and_score_completions
    baselines = (net.sum(1, keepdim=True) - net) / 3
    rloo = left_out_advantages(rewards.numpy(), apart.numpy(), BETA)
    np.testing.assert_allclose(rloo, net - baselines, rtol=1e-6)
