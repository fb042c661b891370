"""Questions to the planner that nobody chose: drawn by number, the same on every machine.

Two to four pools of 1 to 512 chips in all, twelve models of which five have experts, sequences up
to 131,072 tokens, batches from 8. A drawn model's states fit the cluster's memory with some room;
whether a plan exists is the planner's to say.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.models.lengths import length_refusal
from tutti.models.load import load_model
from tutti.models.spec import ModelSpec

NUM_DRAWN = 200
MODELS = (
    "smollm2-360m", "llama-3.2-1b", "gemma-2-2b", "qwen2.5-7b", "llama-3.1-8b", "llama-2-13b",
    "qwen2.5-32b", "deepseek-v2-lite", "qwen3-30b-a3b", "mixtral-8x7b", "glm-4.5-air",
    "deepseek-v2",
)  # fmt: skip
CHIPS = (
    "A100-80", "A100-40", "A800", "H100", "H800", "H20", "V100-32", "L40S", "T4",
    "MI300X", "Ascend-910B1", "P800",
)  # fmt: skip
LENGTHS = (1024, 2048, 4096, 8192, 32768, 131072)
LENGTH_WEIGHTS = (2, 4, 6, 3, 2, 2)
MOST_CHIPS = 512
MOST_BATCH_BITS = 10  # the largest batch is about 2 to this power
STATE_BYTES = 18.0  # per parameter: bf16 weights, fp32 gradients, master copy and moments
ROOM = 0.7  # of all chips' memory, for states
SLOW_LATENCIES = (1e-4, 1e-3, 5e-3)  # seconds between pools: across a hall, a city, a region
SLOW_BANDWIDTHS = (1e9, 3e9, 12.5e9)  # bytes per second and chip


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnQuestion:
    """One question, by its number."""

    number: int
    cluster: Cluster
    model: ModelSpec
    sequence_length: int
    global_batch: int

    @property
    def title(self) -> str:
        """The question in one line."""
        pools = " + ".join(f"{p.num_chips} {p.chip.name}" for p in self.cluster.pools)
        return f"{pools}, {self.model.name}, {self.global_batch} × {self.sequence_length}"


def draw(number: int, most_chips: int = MOST_CHIPS) -> DrawnQuestion:
    """Return the question of a number; `most_chips` draws a smaller family of questions."""
    dice = random.Random(f"tutti drawn question {number}")
    while True:
        cluster = _cluster(dice, number, most_chips)
        model = load_model(dice.choice(MODELS))
        fits = STATE_BYTES * model.num_parameters <= ROOM * cluster.memory_bytes
        lengths = [n for n in LENGTHS if not length_refusal(model, n)]
        weights = [w for n, w in zip(LENGTHS, LENGTH_WEIGHTS, strict=True) if n in lengths]
        if not fits or not lengths:
            continue
        length = dice.choices(lengths, weights)[0]
        batch = _batch(dice)
        return DrawnQuestion(
            number=number,
            cluster=cluster,
            model=model,
            sequence_length=length,
            global_batch=batch,
        )


def _batch(dice: random.Random) -> int:
    """Return a batch of at least 8: mostly a power of two, sometimes any number."""
    bits = dice.randint(3, MOST_BATCH_BITS)
    if dice.random() < 0.7:
        return 1 << bits
    return dice.randint(1 << bits, 2 << bits)


def _cluster(dice: random.Random, number: int, most_chips: int) -> Cluster:
    chips = dice.sample(CHIPS, dice.randint(2, 4))
    left = max(len(chips), round(2 ** dice.uniform(1.0, most_chips.bit_length() - 1)))
    pools: list[dict[str, Any]] = []
    for index, chip in enumerate(chips):
        last = index + 1 == len(chips)
        spare = left - (len(chips) - index - 1)
        wanted = spare if last else dice.randint(1, max(1, spare))
        pool = _pool(dice, f"pool{index}", chip, wanted)
        pools.append(pool)
        left -= pool["chips_per_node"] * pool["nodes"]
    if dice.random() < 0.2:  # little memory: a part of the same chip twice, in two pools
        pools.append(_pool(dice, f"pool{len(pools)}", chips[0], dice.choice((1, 2, 4, 8))))
    document: dict[str, Any] = {"name": f"drawn-{number}", "pools": pools[:4]}
    fabric = _fabric(dice, [pool["name"] for pool in pools[:4]])
    if fabric:
        document["fabric"] = fabric
    return Cluster.from_document(document, Place(f"drawn {number}"))


def _pool(dice: random.Random, name: str, chip: str, wanted: int) -> dict[str, Any]:
    """Return a pool of at most `wanted` chips, in whole nodes of up to eight."""
    most = 4 if chip == "T4" else 8
    per_node = min(wanted, most)
    if per_node < most and dice.random() < 0.5:
        per_node = 1 << (per_node.bit_length() - 1)
    nodes = max(1, wanted // per_node)
    return {"name": name, "chip": chip, "chips_per_node": per_node, "nodes": nodes}


def _fabric(dice: random.Random, names: list[str]) -> dict[str, Any]:
    kind = dice.choice(("plain", "plain", "slow link", "oversubscribed"))
    if kind == "slow link":
        link = {
            "pools": sorted(dice.sample(names, 2)),
            "latency_s": dice.choice(SLOW_LATENCIES),
            "bandwidth": dice.choice(SLOW_BANDWIDTHS),
        }
        return {"links": [link]}
    if kind == "oversubscribed":
        leaf = {"name": "leaf", "nodes": dice.choice((2, 4))}
        return {"tiers": [leaf, {"name": "spine", "oversubscription": dice.choice((2, 4))}]}
    return {}
