"""Engines that fit: which groups of chips, how many layers each, how many sequences at a time.

For each chain of groups and each batch, layers are laid such that the slowest stage is as fast as
it can be and every chip has room for its layers' weights and pages (water-filling, then whole
layers). Rates are those of engines that never wait: what the simulator confirms or corrects.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tutti.cost.serving.pages import PAGES_SHARE
from tutti.plan.serving import PAGE_SIZE, Role
from tutti.search.serving.kinds import BATCHES, ChipGroup, pages_room, prompt_tokens
from tutti.search.serving.question import ServeProblem

MOST_CHAINS = 1500
SPARE_SEQUENCES = 1.15  # sequences are not all of the mean length at the same time
MOST_STAGES = 32
PROMPTS = 16  # at a time on a lane of a prefill engine
Chain = tuple[ChipGroup, ...]  # a group for each stage
SPREAD = 0.85  # of the limit per token, on average: some sequences meet more prompts than others
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
    rate: float  # requests per second, never waiting
    per_token_s: float

    @property
    def chips(self) -> dict[str, int]:
        """Chips of each pool."""
        found: dict[str, int] = {}
        for kind in self.kinds:
            found[kind.pool] = found.get(kind.pool, 0) + kind.tp
        return found

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
    found = []
    for chain in chains(problem, kinds):
        for role in roles:
            if role is not Role.BOTH and len({kind.pool for kind in chain}) > 1:
                continue
            option = best_engine(problem, chain, role)
            if option is not None:
                found.append(option)
    return _undominated(found)


def _undominated(options: Sequence[EngineOption]) -> list[EngineOption]:
    """Keep, of engines with the same chips and role, the fastest."""
    best: dict[object, EngineOption] = {}
    for option in options:
        key = (tuple(sorted(option.chips.items())), option.role)
        if key not in best or option.rate > best[key].rate:
            best[key] = option
    return list(best.values())


# --- chains of groups ----------------------------------------------------------------------------


def chains(problem: ServeProblem, kinds: Sequence[ChipGroup]) -> Iterator[Chain]:
    """Yield the chains worth pricing: of one kind, then of several where one alone is short."""
    most = problem.space.max_stages or MOST_STAGES
    short = False
    for kind in kinds:
        least = fewest_stages(problem, kind)
        if least is None or least > most:
            short = True
            continue
        short |= least > 1
        for stages in _stage_counts(least, min(kind.groups, most)):
            yield (kind,) * stages
    pools = dict.fromkeys(kind.pool for kind in kinds)
    if not problem.space.mix or not short or len(pools) < 2:
        return
    widest = [max((k for k in kinds if k.pool == pool), key=lambda k: k.tp) for pool in pools]
    yield from _mixed(problem, widest, most)


def fewest_stages(problem: ServeProblem, kind: ChipGroup) -> int | None:
    """Return how many groups of a kind hold the model and one sequence; None: all do not."""
    layers = problem.model.num_layers
    one = problem.longest * kind.token_bytes
    for stages in range(1, min(kind.groups, layers, MOST_STAGES) + 1):
        held = math.ceil(layers / stages)
        if pages_room(kind, held, 1.0 if stages > 1 else 2.0) >= held * one:
            return stages
    return None


def _stage_counts(least: int, most: int) -> list[int]:
    wanted = {least, least + 1, least + 2, 2 * least, math.ceil(1.5 * least), most}
    return sorted(stages for stages in wanted if least <= stages <= most)


def _mixed(problem: ServeProblem, kinds: Sequence[ChipGroup], most: int) -> Iterator[Chain]:
    """Yield chains of several kinds, fast memory last: it has the head."""
    counts = [_counts(min(kind.groups, most)) for kind in kinds]
    while math.prod(map(len, counts)) > MOST_CHAINS:
        longest = max(range(len(counts)), key=lambda i: len(counts[i]))
        counts[longest] = [0, *counts[longest][1::2]]
    layers, one = problem.model.num_layers, problem.longest
    for numbers in itertools.product(*counts):
        used = [(kind, number) for kind, number in zip(kinds, numbers, strict=True) if number]
        total = sum(number for _, number in used)
        if len(used) < 2 or not 2 <= total <= min(most, layers):
            continue
        room = sum(
            number * kind.room_bytes / (kind.layer_bytes + one * kind.token_bytes)
            for kind, number in used
        )
        if room >= layers:
            ordered = sorted(used, key=lambda item: item[0].room_bytes)
            yield tuple(kind for kind, number in ordered for _ in range(number))


def _counts(most: int) -> list[int]:
    return list(range(most + 1)) if most <= 12 else [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32]


# --- layers and sequences of a chain -------------------------------------------------------------


def best_engine(problem: ServeProblem, chain: Chain, role: Role) -> EngineOption | None:
    """Return a chain's engine at the batch that serves most requests within the limits.

    Batches are ordered by what they would serve if layers could be split; the best few are laid
    out in whole layers.
    """
    lanes = len(chain)
    fits = [i for i, b in enumerate(BATCHES.tolist()) if b * lanes <= most_slots(problem, lanes)]
    rates = _split_rates(problem, chain, role)
    found: list[EngineOption] = []
    for index in sorted(fits, key=lambda i: -rates[i]):
        if len(found) == _LAID_OUT or rates[index] <= 0.0:
            break
        batch = int(BATCHES[index])
        costs = [_request_seconds(problem, kind, index, role) for kind in chain]
        head = _head_seconds(problem, chain[-1], index, role)
        layers = _layers(problem, chain, costs, head, batch * lanes, role)
        option = layers and _option(problem, chain, layers, costs, head, index, role)
        if option:
            found.append(option)
    return max(found, key=lambda option: option.rate, default=None)


def _per_token_limit(problem: ServeProblem) -> float | None:
    """Return what a token may take on average for most requests to keep their limit."""
    limit = problem.service.limits.per_token_s
    return None if limit is None else SPREAD * limit


def most_slots(problem: ServeProblem, lanes: int) -> int:
    """Return how many sequences an engine may have at a time, each lane at least one."""
    return max(lanes, problem.space.most_slots * (4 if lanes > 1 else 1))


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
    limit = _per_token_limit(problem)
    if limit is not None and role is not Role.PREFILL:
        with np.errstate(divide="ignore"):
            rates = np.where(batches * lanes / (rates * output) <= limit, rates, 0.0)
    found: NDArray[np.float64] = rates
    return found


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
    traffic = problem.service.traffic
    return SPARE_SEQUENCES * (traffic.prompt.expected + traffic.output.expected / 2.0)


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
    costs: Sequence[float],
    head: float,
    index: int,
    role: Role,
) -> EngineOption | None:
    """Return the engine with its rate; None if it misses a limit even when nobody else is there."""
    lanes, batch = len(chain), int(BATCHES[index])
    times = [count * cost for count, cost in zip(layers, costs, strict=True)]
    times[-1] += head
    rate = 1.0 / max(times)
    traffic, limits = problem.service.traffic, problem.service.limits
    prompt_s = sum(n * kind.prefill_s for n, kind in zip(layers, chain, strict=True))
    steps = [kind.mixed_s if role is Role.BOTH else kind.decode_s for kind in chain]
    step_s = sum(n * float(each[index]) for n, each in zip(layers, steps, strict=True))
    step_s += float(chain[-1].head_s[index])
    sequences = lanes * batch
    per_token = max(step_s, sequences / (rate * traffic.output.expected))
    if role is Role.PREFILL:
        per_token = 0.0
    elif per_token > (_per_token_limit(problem) or math.inf):
        return None
    first = prompt_s + (step_s if role is Role.BOTH else 0.0)
    if role is not Role.DECODE and first > (limits.first_token_s or math.inf):
        return None
    pages = _pages(chain, layers)
    if pages // lanes * PAGE_SIZE < problem.longest:
        return None
    if role is Role.PREFILL:  # prompts that wait share steps, as far as pages reach
        held = pages // lanes * PAGE_SIZE // problem.longest
        sequences = lanes * max(1, min(PROMPTS, held))
    return EngineOption(
        kinds=chain, layers=layers, role=role, lanes=lanes, slots=sequences,
        chunk=_chunk(problem, batch, per_token, role), pages=pages,
        rate=rate, per_token_s=per_token,
    )  # fmt: skip


def _chunk(problem: ServeProblem, batch: int, per_token: float, role: Role) -> int:
    """Return the tokens of a step: decodes, and prompts somewhat faster than they come.

    Small steps keep the stages of a pipeline alike; a limit on the first token asks for more.
    """
    if role is Role.PREFILL:
        return problem.space.chunk
    if role is Role.DECODE:
        return max(problem.space.chunk, batch)
    wanted = 1.5 * prompt_tokens(problem, batch)
    limit, prompt = problem.service.limits.first_token_s, problem.service.traffic.prompt.expected
    if limit is not None:
        wanted = max(wanted, 3.0 * prompt * per_token / limit)
    return batch + max(64, 64 * math.ceil(min(wanted, problem.space.chunk) / 64))


def _pages(chain: Chain, layers: tuple[int, ...]) -> int:
    """Return the pages that every stage has room for."""
    fewest = math.inf
    for place, (kind, count) in enumerate(zip(chain, layers, strict=True)):
        ends = float(place == 0) + float(place == len(chain) - 1)
        room = pages_room(kind, count, ends) / (count * kind.token_bytes)
        fewest = min(fewest, room)
    # a little is kept back: units differ by norms and biases
    return max(0, int(0.98 * fewest / PAGE_SIZE)) if np.isfinite(fewest) else 0
