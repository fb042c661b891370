"""A tiny model and data for it, so that a recipe runs on a laptop before it meets a real model.

The data teach a format: small sums, answered in JSON.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

_TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
_LONGER = {
    **_TINY,
    "max_position_embeddings": 512,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256,
    },
}  # fmt: skip
_TEACHER = {**_TINY, "hidden_size": 96, "intermediate_size": 256, "tie_word_embeddings": False}
TINY_MODEL: dict[str, dict[str, Any]] = {"": _TINY, "longer-context": _LONGER}


def _sums(count: int) -> Iterator[tuple[str, int]]:
    numbers = random.Random(7)
    for _ in range(count):
        a, b = numbers.randint(0, 20), numbers.randint(0, 20)
        yield numbers.choice(("What is {} + {}?", "Add {} and {}.")).format(a, b), a + b


def _lines(rows: Iterator[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _chats() -> str:
    return _lines(
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": json.dumps({"answer": total})},
            ]
        }
        for question, total in _sums(400)
    )


def _pairs() -> str:
    return _lines(
        {
            "prompt": [{"role": "user", "content": question}],
            "chosen": [{"role": "assistant", "content": json.dumps({"answer": total})}],
            "rejected": [{"role": "assistant", "content": f"I think that it is {total}."}],
        }
        for question, total in _sums(300)
    )


def _prompts() -> str:
    return _lines(
        {"prompt": [{"role": "user", "content": question}], "answer": total}
        for question, total in _sums(200)
    )


def _rewards() -> str:
    return '''"""Rewards: a function is given a group of answers and their prompt's record."""

import json


def digits(answers, record):
    """The share of digits: what a model learns that knows nothing yet."""
    return [sum(sign in "0123456789" for sign in text) / max(1, len(text)) for text in answers]


def right(answers, record):
    """1 for the sum in JSON, 0.2 for any JSON: for a model that can already speak."""
    return [_right(text, record["answer"]) for text in answers]


def _right(text, wanted):
    try:
        answer = json.loads(text)
    except ValueError:
        return 0.0
    return 1.0 if answer == {"answer": wanted} else 0.2
'''


def _teacher() -> str:
    return """# The teacher of distillation.yaml: a larger model, fine-tuned on the same chats
# run: tutti train teacher.yaml
model: tiny-teacher        # your Hugging Face folder; one that is fine-tuned needs no such run
cluster: laptop
data: {train: [chats.jsonl], holdout: 0.05, tokenizer: bytes}
job: {sequence_length: 128, global_batch: 4}
optimizer: {learning_rate: 3e-3, warmup_steps: 3}
steps: 60
validation: {every: 20}
output: out/teacher
"""


EXAMPLES: dict[str, Callable[[], str]] = {
    "chats.jsonl": _chats,
    "pairs.jsonl": _pairs,
    "prompts.jsonl": _prompts,
    "rewards.py": _rewards,
    "teacher.yaml": _teacher,
    "tiny-teacher/config.json": lambda: json.dumps(_TEACHER, indent=2) + "\n",
}
