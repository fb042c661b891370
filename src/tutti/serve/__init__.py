"""The inference engine: a worker per chip, a sampler on it, and the loop that schedules steps.

`Engine.from_pretrained(folder).generate(prompts)` is all of it in one line. The scheduler is
`tutti.batching`'s, the model `tutti.nn`'s, the arithmetic the accelerator's. What needs torch is
imported when it is first asked for: a process that only speaks HTTP does without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutti.serve.asynchronous import AsyncEngine
    from tutti.serve.engine import Engine
    from tutti.serve.outputs import Answer, Completion, Piece, TokenLogprob
    from tutti.serve.parameters import SamplingParameters

_WHERE = {
    "Answer": "outputs",
    "AsyncEngine": "asynchronous",
    "Completion": "outputs",
    "Engine": "engine",
    "Piece": "outputs",
    "SamplingParameters": "parameters",
    "TokenLogprob": "outputs",
}

__all__ = [
    "Answer",
    "AsyncEngine",
    "Completion",
    "Engine",
    "Piece",
    "SamplingParameters",
    "TokenLogprob",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'tutti.serve' has no attribute '{name}'")
    return getattr(importlib.import_module(f"tutti.serve.{_WHERE[name]}"), name)
