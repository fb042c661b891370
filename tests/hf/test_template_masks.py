"""Twelve forms of chat: the trained tokens are those of transformers' own mask, and those by hand.

Each template is written anew in the form that a family of published models has. With marks around
what the assistant says, transformers returns a mask; without them ours is found by rendering.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from tutti.huggingface.chat import encode_chat  # noqa: E402
from tutti.huggingface.tokenizer import FolderTokenizer  # noqa: E402

OPEN, CLOSE = "⟦", "⟧"  # around what the assistant says
EACH = "{% for m in messages %}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}"
END = "{% endif %}"

# name: (special tokens, template, what each of the assistant's turns ends with)
FORMS: dict[str, tuple[list[str], str, str]] = {
    "chatml": (
        ["<|im_start|>", "<|im_end|>"],
        EACH + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}⟦{{ m.content }}<|im_end|>⟧"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
        + PROMPT + "<|im_start|>assistant\n" + END,
        "<|im_end|>",
    ),
    "llama 3": (
        ["<|begin|>", "<|head|>", "<|/head|>", "<|eot|>"],
        "<|begin|>" + EACH + "<|head|>{{ m.role }}<|/head|>\n\n{% if m.role == 'assistant' %}"
        "⟦{{ m.content | trim }}<|eot|>⟧{% else %}{{ m.content | trim }}<|eot|>{% endif %}"
        + PROMPT + "<|head|>assistant<|/head|>\n\n" + END,
        "<|eot|>",
    ),
    "llama 2": (
        ["<s>", "</s>"],
        "{% set ns = namespace(system='') %}" + EACH + "{% if m.role == 'system' %}"
        "{% set ns.system = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}"
        "{% elif m.role == 'user' %}<s>[INST] {{ ns.system + m.content }} [/INST]"
        "{% set ns.system = '' %}{% else %}⟦ {{ m.content }} </s>⟧{% endif %}{% endfor %}",
        "</s>",
    ),
    "mistral": (
        ["<s>", "</s>", "[INST]", "[/INST]"],
        "<s>" + EACH + "{% if m.role == 'assistant' %}⟦ {{ m.content }}</s>⟧{% else %}"
        "[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}",
        "</s>",
    ),
    "gemma": (
        ["<bos>", "<start_of_turn>", "<end_of_turn>"],
        "<bos>{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' "
        "else '' %}"
        "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
        "{% for m in rest %}{% if m.role == 'assistant' %}<start_of_turn>model\n"
        "⟦{{ m.content | trim }}<end_of_turn>⟧{{ '\n' }}{% else %}<start_of_turn>user\n"
        "{{ (first if loop.first else '') + m.content | trim }}<end_of_turn>\n{% endif %}"
        + PROMPT + "<start_of_turn>model\n" + END,
        "<end_of_turn>",
    ),
    "phi 3": (
        ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
        EACH + "{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}"
        "⟦{{ m.content }}<|end|>⟧{% else %}{{ m.content }}<|end|>{% endif %}\n"
        + PROMPT + "<|assistant|>\n" + END,
        "<|end|>",
    ),
    "zephyr": (
        ["</s>"],
        EACH + "{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}⟦{{ m.content }}</s>⟧"
        "{% else %}{{ m.content }}</s>{% endif %}\n" + PROMPT + "<|assistant|>\n" + END,
        "</s>",
    ),
    "deepseek": (
        ["<bos>", "<eos>", "<|User|>", "<|Assistant|>"],
        "<bos>" + EACH + "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
        "<|User|>{{ m.content }}{% else %}<|Assistant|>⟦{{ m.content }}<eos>⟧{% endif %}"
        + PROMPT + "<|Assistant|>" + END,
        "<eos>",
    ),
    "vicuna": (
        ["<s>", "</s>"],
        "<s>" + EACH + "{% if m.role == 'system' %}{{ m.content }}\n\n{% elif m.role == 'user' %}"
        "USER: {{ m.content }}\n{% else %}ASSISTANT:⟦ {{ m.content }}</s>⟧{{ '\n' }}{% endif %}"
        + PROMPT + "ASSISTANT:" + END,
        "</s>",
    ),
    "command": (
        ["<BOS>", "<|START|>", "<|STOP|>", "<|USER|>", "<|BOT|>", "<|SYSTEM|>"],
        "<BOS>" + EACH + "<|START|>{% if m.role == 'assistant' %}<|BOT|>⟦{{ m.content }}<|STOP|>⟧"
        "{% else %}{{ '<|SYSTEM|>' if m.role == 'system' else '<|USER|>' }}{{ m.content }}<|STOP|>"
        "{% endif %}" + PROMPT + "<|START|><|BOT|>" + END,
        "<|STOP|>",
    ),
    "granite": (
        ["<|role|>", "<|/role|>", "<|eot|>"],
        EACH + "<|role|>{{ m.role }}<|/role|>{% if m.role == 'assistant' %}⟦{{ m.content }}<|eot|>⟧"
        "{% else %}{{ m.content }}<|eot|>{% endif %}\n"
        + PROMPT + "<|role|>assistant<|/role|>" + END,
        "<|eot|>",
    ),
    "alpaca": (
        ["</s>"],
        EACH + "{% if m.role == 'system' %}{{ m.content }}\n\n{% elif m.role == 'user' %}"
        "### Instruction:\n{{ m.content }}\n\n{% else %}### Response:\n⟦{{ m.content }}</s>⟧"
        "{{ '\n\n' }}"
        "{% endif %}" + PROMPT + "### Response:\n" + END,
        "</s>",
    ),
}  # fmt: skip

ANSWERS = ["Fine, and you?", "In Köln:\n- 12 °C\n- rain"]
TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ANSWERS[0]}],
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": ANSWERS[0]},
        {"role": "user", "content": "And the weather?"},
        {"role": "assistant", "content": ANSWERS[1]},
    ],
]


def folder(path: Path, special: list[str], template: str, end: str) -> Path:
    """A tokenizer of bytes, some of which are joined, with a template."""
    whole = tokenizers.Tokenizer(tokenizers.models.BPE())
    whole.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300 + len(special), special_tokens=special, show_progress=False,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    whole.train_from_iterator([m["content"] for talk in TALKS for m in talk] * 5, trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=whole, eos_token=end, additional_special_tokens=special,
        chat_template=template,
    ).save_pretrained(path)  # fmt: skip
    return path


@pytest.mark.parametrize("name", FORMS)
def test_trained_tokens_are_those_of_transformers_and_those_by_hand(
    name: str, tmp_path: Path
) -> None:
    special, template, end = FORMS[name]
    marked = template.replace(OPEN, "{% generation %}").replace(CLOSE, "{% endgeneration %}")
    plain = template.replace(OPEN, "").replace(CLOSE, "")
    with_marks = folder(tmp_path / "marked", special, marked, end)
    without = FolderTokenizer(folder(tmp_path / "plain", special, plain, end))
    theirs = transformers.AutoTokenizer.from_pretrained(with_marks)
    for talk in TALKS:
        expected = theirs.apply_chat_template(
            talk, return_assistant_tokens_mask=True, return_dict=True
        )
        for tokenizer in (FolderTokenizer(with_marks), without):
            tokens, trained = encode_chat(tokenizer, talk, lambda: "row 0")
            assert tokens.tolist() == expected["input_ids"]
            assert trained.astype(int).tolist() == expected["assistant_masks"]
            said = [m["content"] + end for m in talk if m["role"] == "assistant"]
            found = [text.strip() for text in runs(tokenizer, tokens, trained)]
            assert [text.replace(" " + end, end) for text in found] == said


def runs(tokenizer: FolderTokenizer, tokens: Any, trained: Any) -> list[str]:
    """The trained runs as text."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], trained.astype(int), [0]))))
    pairs = list(pairwise(edges.tolist()))[::2]
    return [tokenizer.decode(tokens[first:last].tolist()) for first, last in pairs]
