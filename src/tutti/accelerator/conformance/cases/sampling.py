"""Calls of the choice of a token: exact, whatever the dtype of the logits."""

from __future__ import annotations

from typing import Any

from tutti.accelerator.conformance.case import Case, Integers, Values

WARM, COLD = 0.7, 0.0


def _case(
    name: str,
    rows: int = 6,
    vocabulary: int = 97,
    *,
    temperature: float = WARM,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: tuple[int, ...] | None = None,
    **options: Any,
) -> Case:
    def column(value: float) -> Integers:
        return Integers((value,) * rows, real=True)

    return Case(
        "sample",
        name,
        (Values((rows, vocabulary), distinct=vocabulary <= 256, trained=False),),
        {
            "temperature": column(temperature),
            "top_k": Integers((top_k,) * rows),
            "top_p": column(top_p),
            "min_p": column(min_p),
            "seeds": Integers(tuple(range(3, 3 + rows)) if seeds is None else seeds),
            "positions": Integers(tuple(range(100, 100 + rows))),
            **options,
        },
    )


CASES = (
    _case("greedy", temperature=COLD),
    _case("greedy, said beforehand", temperature=COLD, draws=False, cuts=False),
    _case("temperature"),
    _case("temperature, nothing cut", cuts=False),
    _case("hot", temperature=40.0),
    _case("1 row", 1),
    _case("top-k", top_k=3),
    _case("top-k of one", top_k=1),
    _case("top-k beyond the vocabulary", top_k=1000),
    _case("top-p", top_p=0.6),
    _case("top-p of nearly nothing", top_p=1e-6),
    _case("min-p", min_p=0.2),
    _case("all of them", top_k=20, top_p=0.9, min_p=0.05),
    _case("large vocabulary", 3, 256, top_p=0.95),
    _case("one seed for all", seeds=(11,) * 6),
    _case("large seeds", seeds=(2**62, 2**63 - 1, -1, -(2**63), 0, 1)),
    _case("a vocabulary of several blocks", 3, 9001, cuts=False),
    _case("many rows, nothing cut", 300, 64, cuts=False),
    _case("large seeds, nothing cut", seeds=(2**62, 2**63 - 1, -1, -(2**63), 0, 1), cuts=False),
    _case("greedy, a large vocabulary", 2, 9001, temperature=COLD, draws=False, cuts=False),
    _case("no tokens", 0),
)
