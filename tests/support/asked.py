"""What tests ask a server for, and what it must refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

from tests.support.served import Served
from tutti.serve import Engine, SamplingParameters

PROMPT = "once upon a time"


def offline(engine: Engine, count: int, **options: Any) -> str:
    wishes = SamplingParameters(max_tokens=count, **options)
    text = engine.generate([PROMPT], wishes)[0].text
    assert text is not None
    return text


BAD: list[tuple[str, dict[str, Any] | str, int, str]] = [
    ("completions", "{", 400, "JSON"),
    ("completions", {"prompt": PROMPT, "temprature": 1}, 400, "did you mean 'temperature'?"),
    ("completions", {"prompt": PROMPT, "temperature": 9}, 400, "temperature"),
    ("completions", {"prompt": ""}, 400, "the prompt is empty"),
    ("completions", {"prompt": []}, 400, "the prompt is empty"),
    ("completions", {"prompt": [5, 99999]}, 400, "token 99999: the vocabulary has 0 to 511"),
    ("completions", {"prompt": PROMPT, "max_tokens": 5000}, 400, "the context holds 1024"),
    ("completions", {"prompt": PROMPT, "model": "other"}, 404, "there is 'tiny'"),
    ("completions", {"prompt": PROMPT, "suffix": "x"}, 400, "'suffix' is not served"),
    ("completions", {"prompt": PROMPT, "n": 1000}, 400, "n: "),
    ("completions", {"prompt": PROMPT, "stop": [""]}, 400, "empty text in 'stop'"),
    ("completions", {"prompt": PROMPT, "logit_bias": {"x": 1}}, 400, "token ids"),
    ("completions", {"prompt": PROMPT, "regex": "a("}, 400, "the grammar cannot be read"),
    ("completions", {"prompt": PROMPT, "regex": "a", "grammar": 'start: "a"'}, 400, "one of them"),
    ("chat/completions", {"messages": []}, 400, "messages"),
    ("chat/completions", {"messages": [{"content": "a"}]}, 400, "'role'"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "reads text alone",
    ),
    ("embeddings", {"input": PROMPT, "dimensions": 3}, 400, "'dimensions' may be 64"),
    ("load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}, 400, "/nowhere"),
    ("unload_lora_adapter", {"lora_name": "nobody"}, 400, "nobody"),
]


def lines(server: Served, count: int, **wishes: Any) -> Iterator[str]:
    """Yield the texts of a stream."""
    body = {
        "prompt": PROMPT,
        "max_tokens": count,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        **wishes,
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as said:
        for line in said.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])["choices"][0]["text"]
