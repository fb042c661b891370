"""SmolLM2-135M with its real weights: the same greedy text as transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.huggingface import open_checkpoint  # noqa: E402
from tutti.huggingface.conversion import convert  # noqa: E402
from tutti.nn import Batch, Model, greedy, load  # noqa: E402

PROMPTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):\n"]
TOKENS = 12


def test_greedy_text_and_logits_are_transformers(smollm: Path, tmp_path: Path) -> None:
    convert(smollm, tmp_path / "ours")
    checkpoint = open_checkpoint(tmp_path / "ours")
    model = Model(checkpoint.spec, Operators("cpu"))
    load(model, checkpoint)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm)
    hf = transformers.AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32).eval()
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    ours = greedy(model, prompts, TOKENS)
    for prompt, new in zip(prompts, ours, strict=True):
        given = torch.tensor([prompt])
        mask = torch.ones_like(given)
        theirs = hf.generate(
            given,
            attention_mask=mask,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
        )
        assert tokenizer.decode(new) == tokenizer.decode(theirs[0, len(prompt) :])
    assert tokenizer.decode(ours[0]).startswith(" Paris.")
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    with torch.no_grad():
        packed = model.logits(Batch.of(checkpoint.spec, tokens, [len(p) for p in prompts]))
        for part, prompt in zip(packed.split([len(p) for p in prompts]), prompts, strict=True):
            expected = hf(torch.tensor([prompt])).logits[0]
            alone = model.logits(Batch.of(checkpoint.spec, torch.tensor(prompt), [len(prompt)]))
            # logits are as large as 30; products of other shapes add up in another order
            least = 1e-5 * float(expected.abs().max())
            torch.testing.assert_close(alone, expected, rtol=0, atol=least)
            torch.testing.assert_close(part, expected, rtol=0, atol=least)
