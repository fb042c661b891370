"""Engines that fit: which groups of chips, how many layers each, how many sequences at a time.

For each chain of groups and each batch, layers are laid such that the slowest stage is as fast as
it can be and every chip has room for its layers' weights and pages (water-filling, then whole
layers). Rates are those of the long run: what the simulator confirms or corrects.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tutti.batching.settings import PAGES_SHARE
from tutti.plan.serving import PAGE_SIZE, Role
from tutti.search.serving.chains import Chain, chains
from tutti.search.serving.kinds import BATCHES, ChipGroup, pages_room
from tutti.search.serving.long_run import Held
from tutti.search.serving.question import ServeProblem
from tutti.search.serving.sizes import most_slots, per_token_limit, size_of

SPARE_SEQUENCES = 1.05  # prompts under way hold pages too
_LAID_OUT = 2  # batches of a chain that are laid out in whole layers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineOption:
    """An engine that fits, with its rate under the limits."""

    kinds: Chain  # of each stage, in order
    layers: tuple[int, ...]  # of each stage
    role: Role
    lanes: int
    slots: int  # all lanes
    chunk: int  # tokens of a step
    pages: int
    rate: float  # requests per second in the long run, a prefill engine's with room for its queue
    ideal: float  # never waiting
    per_token_s: float

    @property
    def chips(self) -> dict[str, int]:
        """Chips of each pool."""
        chips: dict[str, int] = {}
        for kind in self.kinds:
            chips[kind.pool] = chips.get(kind.pool, 0) + kind.tp
        return chips

    @property
    def num_chips(self) -> int:
        """Chips of all stages."""
        return sum(kind.tp for kind in self.kinds)

    @property
    def home(self) -> str:
        """The pool that its keys and values leave from, or come to."""
        return self.kinds[0].pool

    @property
    def price(self) -> float:
        """Per hour; pools without a price cost nothing."""
        return sum(kind.price or 0.0 for kind in self.kinds)

    @property
    def name(self) -> str:
        """What tables call it: "4 + 4 layers on a, b"."""
        runs = [(kind.name, list(group)) for kind, group in itertools.groupby(self.kinds)]
        return " → ".join(f"{len(g)} stages of {n}" if len(g) > 1 else n for n, g in runs)


def engine_options(
    problem: ServeProblem, kinds: Sequence[ChipGroup], roles: Sequence[Role]
) -> list[EngineOption]:
    """Return the best engine of each chain of groups and role."""
    options = []
    for chain in chains(problem, kinds):
        for role in roles:
            if role is not Role.BOTH and len({kind.pool for kind in chain}) > 1:
                continue
            option = best_engine(problem, chain, role)
            if option is not None:
                options.append(option)
    return _undominated(options)


def _undominated(options: Sequence[EngineOption]) -> list[EngineOption]:
    """Keep, of engines with the same chips and role, the fastest."""
    best: dict[object, EngineOption] = {}
    for option in options:
        key = (tuple(sorted(option.chips.items())), option.role)
        if key not in best or option.rate > best[key].rate:
            best[key] = option
    return list(best.values())


# --- layers and sequences of a chain -------------------------------------------------------------


def best_engine(problem: ServeProblem, chain: Chain, role: Role) -> EngineOption | None:
    """Return a chain's engine at the batch that serves most requests within the limits.

    Batches are ordered by what they would serve if layers could be split; the best few are laid
    out in whole layers.
    """
    lanes = len(chain)
    fits = [i for i, b in enumerate(BATCHES.tolist()) if b * lanes <= most_slots(problem, lanes)]
    rates = _split_rates(problem, chain, role)
    engines: list[EngineOption] = []
    for index in sorted(fits, key=lambda i: -rates[i]):
        if len(engines) == _LAID_OUT or rates[index] <= 0.0:
            break
        batch = int(BATCHES[index])
        costs = [_request_seconds(problem, kind, index, role) for kind in chain]
        head = _head_seconds(problem, chain[-1], index, role)
        layers = _layers(problem, chain, costs, head, batch * lanes, role)
        option = layers and _option(problem, chain, layers, index, role, float(rates[index]))
        if option:
            engines.append(option)
    return max(engines, key=lambda option: option.rate, default=None)


def _split_rates(problem: ServeProblem, chain: Chain, role: Role) -> NDArray[np.float64]:
    """Return the rate at each batch if layers could be split; 0 where memory does not reach."""
    counts = Counter(id(kind) for kind in chain)
    kinds = list({id(kind): kind for kind in chain}.values())
    number = np.array([counts[id(kind)] for kind in kinds], np.float64)[:, None]
    batches, lanes = BATCHES.astype(np.float64), len(chain)
    output, total = problem.service.traffic.output.expected, float(problem.model.num_layers)
    costs = np.array(
        [[_request_seconds(problem, kind, i, role) for i in range(len(batches))] for kind in kinds]
    )
    tokens = np.maximum(batches * lanes * _sequence_tokens(problem), float(problem.longest))
    if role is Role.PREFILL:
        tokens = np.full(len(batches), max(4.0 * problem.service.traffic.prompt.expected,
                                           float(problem.longest)))  # fmt: skip
    each = np.array([k.layer_bytes for k in kinds])[:, None] + (
        np.array([k.token_bytes for k in kinds])[:, None] * tokens / PAGES_SHARE
    )
    caps = np.array([kind.room_bytes for kind in kinds])[:, None] / each
    high = costs.max(axis=0) * total
    low = np.zeros_like(high)
    for _ in range(30):
        middle = (low + high) / 2.0
        enough = (number * np.minimum(caps, middle / costs)).sum(axis=0) >= total
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    rates = np.where((number * caps).sum(axis=0) >= total, 1.0 / high, 0.0)
    limit = per_token_limit(problem)
    if limit is not None and role is not Role.PREFILL:
        with np.errstate(divide="ignore"):
            rates = np.where(batches * lanes / (rates * output) <= limit, rates, 0.0)
    split: NDArray[np.float64] = rates
    return split


def _request_seconds(problem: ServeProblem, kind: ChipGroup, index: int, role: Role) -> float:
    """Return the seconds that one request takes of a layer, all its steps together."""
    if role is Role.PREFILL:
        return kind.prefill_s
    steps = kind.decode_s if role is Role.DECODE else kind.mixed_s
    return problem.service.traffic.output.expected * float(steps[index]) / float(BATCHES[index])


def _head_seconds(problem: ServeProblem, kind: ChipGroup, index: int, role: Role) -> float:
    if role is Role.PREFILL:
        return float(kind.head_s[0])
    output = problem.service.traffic.output.expected
    return output * float(kind.head_s[index]) / float(BATCHES[index])


def _sequence_tokens(problem: ServeProblem) -> float:
    return SPARE_SEQUENCES * Held.of(problem.service.traffic).decode


def _layers(
    problem: ServeProblem,
    chain: Chain,
    costs: Sequence[float],
    head: float,
    sequences: int,
    role: Role,
) -> tuple[int, ...] | None:
    """Return whole layers of each stage for the fastest slowest stage; None: no room."""
    total = problem.model.num_layers
    tokens = max(sequences * _sequence_tokens(problem), float(problem.longest))
    if role is Role.PREFILL:
        tokens = max(4.0 * problem.service.traffic.prompt.expected, float(problem.longest))
    most = []
    for place, kind in enumerate(chain):
        ends = float(place == 0) + float(place == len(chain) - 1)
        left = kind.room_bytes - ends * kind.ends_bytes
        each = kind.layer_bytes + tokens * kind.token_bytes / PAGES_SHARE
        most.append(max(0, int(left / each)))
    if sum(most) < total:
        return None
    extra = [head if place == len(chain) - 1 else 0.0 for place in range(len(chain))]
    low, high = 0.0, max(costs) * total + head
    for _ in range(40):  # the smallest time within which all layers are computed
        middle = (low + high) / 2.0
        room = sum(
            min(cap, max(0.0, (middle - more) / cost))
            for cap, cost, more in zip(most, costs, extra, strict=True)
        )
        low, high = (low, middle) if room >= total else (middle, high)
    parts = [
        min(float(cap), max(0.0, (high - more) / cost))
        for cap, cost, more in zip(most, costs, extra, strict=True)
    ]
    return _whole(parts, most, costs, extra, total)


def _whole(
    parts: Sequence[float],
    most: Sequence[int],
    costs: Sequence[float],
    extra: Sequence[float],
    total: int,
) -> tuple[int, ...] | None:
    """Round layers: down, then up where the stage stays fastest; every stage has one."""
    layers = [max(1, math.floor(part)) for part in parts]
    if any(cap < 1 for cap in most):
        return None
    while sum(layers) > total:
        slowest = max(
            (i for i in range(len(layers)) if layers[i] > 1),
            key=lambda i: layers[i] * costs[i] + extra[i],
            default=None,
        )
        if slowest is None:
            return None
        layers[slowest] -= 1
    while sum(layers) < total:
        open_ = [i for i in range(len(layers)) if layers[i] < most[i]]
        if not open_:
            return None
        fastest = min(open_, key=lambda i: (layers[i] + 1) * costs[i] + extra[i])
        layers[fastest] += 1
    return tuple(layers)


def _option(
    problem: ServeProblem,
    chain: Chain,
    layers: tuple[int, ...],
    index: int,
    role: Role,
    split: float,
) -> EngineOption | None:
    """Return the engine with its rate; None if it misses a limit even when nobody else is there."""
    pages = _pages(chain, layers)
    size = size_of(problem, chain, layers, pages, int(BATCHES[index]), role)
    if size is None:
        return None
    return EngineOption(
        kinds=chain, layers=layers, role=role, lanes=size.lanes, slots=size.slots,
        chunk=size.chunk, pages=pages, rate=size.rate, ideal=max(size.ideal, size.rate, split),
        per_token_s=size.per_token_s,
    )  # fmt: skip


def _pages(chain: Chain, layers: tuple[int, ...]) -> int:
    """Return the pages that every stage has room for."""
    fewest = math.inf
    for place, (kind, count) in enumerate(zip(chain, layers, strict=True)):
        ends = float(place == 0) + float(place == len(chain) - 1)
        room = pages_room(kind, count, ends) / (count * kind.token_bytes)
        fewest = min(fewest, room)
    # a little is kept back: units differ by norms and biases
    return max(0, int(0.98 * fewest / PAGE_SIZE)) if np.isfinite(fewest) else 0
