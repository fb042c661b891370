"""The inference engine: a worker per chip, a sampler on it, and the loop that schedules steps.

`Engine.from_pretrained(folder).generate(prompts)` is all of it in one line. The scheduler is
`tutti.batching`'s, the model `tutti.nn`'s, the arithmetic the accelerator's.
"""

from tutti.serve.asynchronous import AsyncEngine
from tutti.serve.engine import Engine
from tutti.serve.outputs import Answer, Completion, Piece, TokenLogprob
from tutti.serve.parameters import SamplingParameters

__all__ = [
    "Answer",
    "AsyncEngine",
    "Completion",
    "Engine",
    "Piece",
    "SamplingParameters",
    "TokenLogprob",
]
