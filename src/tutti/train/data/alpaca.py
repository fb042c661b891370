"""Records of Stanford Alpaca's fields: an instruction, perhaps an input to it, and the output.

A tokenizer with a chat template renders them as a conversation; others get Alpaca's own prompt.
"""

from __future__ import annotations

from collections.abc import Mapping

ALPACA_FIELDS = ("instruction", "output", "input", "system")  # the last two may be absent

# As published with the data set (stanford_alpaca/train.py).
_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_WITHOUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


def alpaca_messages(record: Mapping[str, str]) -> list[dict[str, str]]:
    """Return a record as a conversation of two turns, after what its system says."""
    asked = "\n\n".join(filter(None, (record["instruction"], record.get("input", ""))))
    system = record.get("system", "")
    return [
        *([{"role": "system", "content": system}] if system else []),
        {"role": "user", "content": asked},
        {"role": "assistant", "content": record["output"]},
    ]


def alpaca_prompt(record: Mapping[str, str]) -> str:
    """Return Alpaca's prompt, behind which the output stands."""
    form = _WITH_INPUT if record.get("input") else _WITHOUT
    system = record.get("system", "")
    asked = form.replace("{instruction}", record["instruction"], 1)
    return (f"{system}\n\n" if system else "") + asked.replace(
        "{input}", record.get("input", ""), 1
    )
