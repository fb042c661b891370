"""The tokenizer inside a GGUF file, as the files that transformers reads.

Byte-level BPE only: vocabulary and merges stand in the file, how text is split before them only as
a name, which `_SPLITS` spells out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tutti.errors import InputError, hint

_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types that text never yields

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
# How Llama 3 splits: contractions, words, up to three digits, punctuation, spaces.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Mapping[str, dict[str, Any]] = {
    "default": _BYTES,
    "gpt-2": _BYTES,
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTES]},
    "llama-bpe": {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": _LLAMA3},
                "behavior": "Isolated",
                "invert": False,
            },
            {**_BYTES, "use_regex": False},
        ],
    },
}


def tokenizer_files(fields: Mapping[str, Any], source: str) -> dict[str, str]:
    """Return tokenizer.json and tokenizer_config.json."""
    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise InputError(
            f"{source}: its tokenizer is '{kind}'; tutti reads 'gpt2' (byte-level BPE)"
        )
    if split not in _SPLITS:
        raise InputError(f"{source}: its tokenizer splits as '{split}'; {hint(split, _SPLITS)}")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    return {
        "tokenizer.json": json.dumps(_tokenizer(fields, tokens, types, split), ensure_ascii=False),
        "tokenizer_config.json": json.dumps(_settings(fields, tokens), indent=2) + "\n",
    }


def _tokenizer(
    fields: Mapping[str, Any], tokens: list[str], types: list[int], split: str
) -> dict[str, Any]:
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": _SPLITS[split],
        "post_processor": None,
        "decoder": _BYTES,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": split == "llama-bpe",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _settings(fields: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields.get("llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for ours, theirs in names.items():
        index = fields.get(f"tokenizer.ggml.{theirs}_token_id")
        if index is not None:
            settings[f"{ours}_token"] = tokens[index]
    if "tokenizer.chat_template" in fields:
        settings["chat_template"] = fields["tokenizer.chat_template"]
    return settings
