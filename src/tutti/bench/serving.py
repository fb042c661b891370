"""Serving without a network: our engine on a trace of requests, transformers' beside it.

Both get the same prompts and the same numbers of new tokens, all at once, on the same threads, and
ignore the model's own end. What is timed begins when all requests are handed over and ends with the
last token; opening the folder is timed by itself. Each side runs once before, on two short
requests, so that nothing is made for the first time while the clock runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tutti.batching import Request, Scheduler, Settings, Tokens
from tutti.bench.traces import Asked
from tutti.errors import InputError
from tutti.serve import Engine, SamplingParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What one engine did with a trace."""

    engine: str
    dtype: str
    seconds: float
    output_tokens: int
    prompt_tokens: int
    load_s: float
    cpu_s: float  # of the processor, all threads together: others' work does not change it much
    first_token_s: tuple[float, ...] = ()  # of each request
    note: str = ""

    @property
    def output_rate(self) -> float:
        """New tokens per second."""
        return self.output_tokens / self.seconds

    def percentile(self, share: float) -> float | None:
        """Return a percentile of the time to the first token."""
        if not self.first_token_s:
            return None
        return float(np.percentile(np.array(self.first_token_s), share))


def run_tutti(folder: Path, asked: Sequence[Asked], **options: Any) -> Served:
    """Serve a trace with our engine."""
    started = time.perf_counter()
    engine = Engine.from_pretrained(folder, **options)
    load_s = time.perf_counter() - started
    engine.generate([[1, 2, 3]] * 2, SamplingParameters(max_tokens=4, ignore_end=True))
    wishes = [SamplingParameters(max_tokens=one.new, ignore_end=True) for one in asked]
    started, spent = time.perf_counter(), time.process_time()
    done = engine.generate([one.prompt for one in asked], wishes)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - spent
    return Served(
        engine="tutti",
        dtype=str(next(engine.worker.model.parameters()).dtype).removeprefix("torch."),
        seconds=seconds,
        output_tokens=sum(len(one.tokens) for one in done),
        prompt_tokens=sum(len(one.prompt) for one in asked),
        load_s=load_s,
        cpu_s=cpu_s,
        first_token_s=tuple(one.times.first_token_s or 0.0 for one in done),
    )


def run_transformers(
    folder: Path, asked: Sequence[Asked], *, device: str | None, dtype: str
) -> Served:
    """Serve a trace with transformers' continuous batching."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    started = time.perf_counter()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    model = model.to(device or _device()).eval()
    load_s = time.perf_counter() - started
    settings = transformers_settings(asked)
    generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with torch.no_grad():
        _transformers_once(model, generation, settings, [Asked(prompt=(1, 2, 3), new=4)] * 2)
        seconds, cpu_s, count = _transformers_once(model, generation, settings, asked)
    return Served(
        engine="transformers",
        dtype=dtype,
        seconds=seconds,
        output_tokens=count,
        prompt_tokens=sum(len(one.prompt) for one in asked),
        load_s=load_s,
        cpu_s=cpu_s,
        note=f"continuous batching of transformers {transformers.__version__}, sdpa",
    )


def transformers_settings(asked: Sequence[Asked]) -> Any:
    """Return pages for all requests at once, as transformers names them today or did before."""
    import transformers

    kind: Any = transformers.ContinuousBatchingConfig
    size = "page_size" if "page_size" in kind.__dataclass_fields__ else "block_size"
    tokens = sum(len(one.prompt) + one.new for one in asked)
    return kind(num_blocks=tokens // 16 + 2 * len(asked) + 64, max_batch_tokens=2048, **{size: 16})


def _device() -> torch.device:
    from tutti.accelerator import open_accelerator

    return open_accelerator().device


def _transformers_once(
    model: Any, generation: Any, settings: Any, asked: Sequence[Asked]
) -> tuple[float, float, int]:
    manager = model.init_continuous_batching(
        generation_config=generation, continuous_batching_config=settings
    )
    manager.start()
    started, spent = time.perf_counter(), time.process_time()
    for one in asked:
        manager.add_request(list(one.prompt), max_new_tokens=one.new)
    finished = count = 0
    while finished < len(asked):
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise InputError(
                    "transformers' continuous batching stopped before its requests did"
                )
            continue
        if result.is_finished():
            finished += 1
            count += len(result.generated_tokens)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - spent
    manager.stop(block=True)
    return seconds, cpu_s, count


# --- the scheduler alone ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """Host time of the scheduler for a step in which every slot decodes."""

    slots: int
    steps: int
    median_s: float
    p99_s: float


def time_scheduling(slots: int = 256, steps: int = 1000) -> Scheduled:
    """Time making a step and taking its tokens, without a chip."""
    settings = Settings(
        slots=slots, pages=slots * 96, page_size=16, max_length=4096, most_tokens=16384, ahead=2
    )
    scheduler = Scheduler(settings)
    drawn = np.random.default_rng(0)
    for number in range(slots):
        prompt = tuple(drawn.integers(0, 50_000, int(drawn.integers(64, 512))).tolist())
        scheduler.arrive(Request(id=number, prompt=prompt, most_new=steps + 50))
    under_way, seconds = [], []
    for _ in range(steps):
        started = time.perf_counter()
        step = scheduler.next_step()
        made = time.perf_counter() - started
        assert step is not None
        under_way.append(step)
        if len(under_way) < 2:
            continue
        oldest = under_way.pop(0)
        count = len(oldest.sample_slots)
        event = Tokens(
            oldest.number,
            drawn.integers(0, 50_000, count).astype(np.int32),
            np.zeros(count, np.int8),
        )
        started = time.perf_counter()
        scheduler.receive(event)
        if len(step.slots) == slots:
            seconds.append(made + time.perf_counter() - started)
    seconds_n = np.array(seconds)
    return Scheduled(
        slots=slots,
        steps=len(seconds_n),
        median_s=float(np.median(seconds_n)),
        p99_s=float(np.percentile(seconds_n, 99)),
    )
