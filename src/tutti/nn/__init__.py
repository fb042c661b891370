"""Decoder models as torch modules, built from a `ModelSpec` out of accelerator operators.

A model is a row of units: 0 the embedding, 1…L the blocks, L+1 the head; a `Model` holds any range
of them. Tokens come packed: activations are (T, C), whatever the sequences in them. Parallelism is
an argument (`ParallelContext`), never a second version of the code.

Shape suffixes, here and in every module: T tokens, S keys, C model width, H query heads, G
key-value heads, D head width, F feed-forward width, V vocabulary, E experts, K experts per token.
In code that runs sliced, H, G, F and V are what this rank holds.
"""

from tutti.nn.batch import Batch
from tutti.nn.build import build_unit
from tutti.nn.cache import PagedCache
from tutti.nn.generate import greedy
from tutti.nn.initialize import initialize
from tutti.nn.load import load
from tutti.nn.model import Model, Output
from tutti.nn.parallel.groups import ALONE, Group, ParallelContext, Ranks
from tutti.nn.storage import Logical

__all__ = [
    "ALONE",
    "Batch",
    "Group",
    "Logical",
    "Model",
    "Output",
    "PagedCache",
    "ParallelContext",
    "Ranks",
    "build_unit",
    "greedy",
    "initialize",
    "load",
]
