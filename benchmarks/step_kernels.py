"""Which kernels a training step of one chip spends its time in.

python benchmarks/step_kernels.py llama-3-8b 2
"""

from __future__ import annotations

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from tutti.accelerator import open_accelerator
from tutti.cli.train_speed import SETTINGS, SpeedQuestion, _tokens
from tutti.nn.batch import Batch
from tutti.nn.initialize import initialize
from tutti.plan.job import PRECISIONS
from tutti.train.alone import NoLinks, plan_alone
from tutti.train.engine import Engine


def main(model: str, micro_batch: int) -> None:
    asked = SpeedQuestion(
        model=model, device=None, micro_batch=micro_batch, sequence_length=4096, layers=None,
        precision="pure_bf16", steps=1,
    )  # fmt: skip
    accelerator, spec = open_accelerator(None), asked.spec()
    plan = plan_alone(
        spec, sequence_length=4096, micro_batch=micro_batch, precision=PRECISIONS["pure_bf16"]
    )
    engine = Engine(plan, spec, 0, accelerator, NoLinks(), clip_norm=None)
    initialize(engine.model)
    engine.take_masters()
    tokens, targets = _tokens(asked, spec, accelerator, 0)
    batch = Batch.of(spec, tokens.flatten(), [4096] * micro_batch, targets_t=targets.flatten())
    for _ in range(3):
        engine.step(lambda _: batch, SETTINGS)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        engine.step(lambda _: batch, SETTINGS)
        torch.cuda.synchronize()
    table = found.key_averages().table(sort_by="self_cuda_time_total", row_limit=45)
    print("\n".join(line[:60] + line[-120:] for line in table.splitlines()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
