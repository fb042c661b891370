"""One process on the CPU: tutti's step beside a plain transformers loop, tokens per CPU second.

python benchmarks/cpu_steps.py

A Llama of 16 million parameters, float32, one thread, AdamW on both sides. The two take turns in
one process and processor time counts, so that other jobs of the machine matter little; each round
is printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from tutti.accelerator import open_accelerator
from tutti.bench.train_speed import SETTINGS
from tutti.models import read_config
from tutti.nn.batch import Batch
from tutti.nn.initialize import initialize
from tutti.plan.job import PRECISIONS
from tutti.ranks.single_rank import NoLinks, plan_alone
from tutti.train.engine.engine import Engine

CONFIG = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 704, "vocab_size": 16384,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def our_step(sequences: int, length: int, tokens: torch.Tensor) -> Callable[[], float]:
    """Return a step of the engine."""
    spec = read_config(CONFIG, "llama-16m")
    plan = plan_alone(
        spec, sequence_length=length, micro_batch=sequences, precision=PRECISIONS["fp32"]
    )
    engine = Engine(plan, spec, 0, open_accelerator("cpu"), NoLinks(), clip_norm=None)
    initialize(engine.model)
    engine.take_masters()
    own, targets = tokens[:, :-1].flatten(), tokens[:, 1:].flatten()
    batch = Batch.of(spec, own, [length] * sequences, targets_t=targets)
    return lambda: engine.step(lambda _: batch, SETTINGS).loss


def their_step(tokens: torch.Tensor) -> Callable[[], float]:
    """Return a step of the plain loop."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {name: value for name, value in CONFIG.items() if name != "model_type"}
    config = AutoConfig.for_model("llama", **values)
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=SETTINGS.learning_rate, betas=(SETTINGS.beta1, SETTINGS.beta2),
        eps=SETTINGS.eps, weight_decay=SETTINGS.weight_decay, fused=True,
    )  # fmt: skip
    inputs = tokens[:, :-1].contiguous()

    def step() -> float:
        loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    shape = (asked.sequences, asked.sequence_length + 1)
    tokens = torch.randint(CONFIG["vocab_size"], shape, generator=torch.Generator().manual_seed(0))
    steps = {
        "tutti": our_step(asked.sequences, asked.sequence_length, tokens),
        "transformers": their_step(tokens),
    }
    for step in steps.values():
        step()
    count = asked.sequences * asked.sequence_length
    for number in range(asked.rounds):
        used = dict.fromkeys(steps, 0.0)
        for _ in range(asked.steps):
            for name, step in steps.items():
                begin = time.process_time()
                step()
                used[name] += time.process_time() - begin
        rates = {name: asked.steps * count / seconds for name, seconds in used.items()}
        ratio = rates["tutti"] / rates["transformers"]
        words = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
        print(f"round {number + 1}: tokens per CPU second: {words}: {ratio:.2f}×")


if __name__ == "__main__":
    main()
