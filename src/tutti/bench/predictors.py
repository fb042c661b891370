"""Other predictors, run beside ours by `tutti bench predict`: strategies per second on one core.

Each peer prices the same model on the same chip, strategy by strategy, as its own documentation
drives it. A peer that is not installed, or cannot be driven, is answered with the reason.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 2.0  # for each peer
DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRate:
    """How fast a peer is, or why that is not known."""

    name: str
    strategies: int = 0
    cpu_s: float = 0.0
    note: str = ""

    @property
    def per_second(self) -> float | None:
        """Strategies per second of one core."""
        return self.strategies / self.cpu_s if self.cpu_s else None


def _timed(name: str, price: Callable[[Any], object], work: Iterator[Any], note: str) -> PeerRate:
    count, started = 0, time.process_time()
    for item in work:
        price(item)
        count += 1
        if time.process_time() - started > SECONDS:
            break
    return PeerRate(name=name, strategies=count, cpu_s=time.process_time() - started, note=note)


def llm_analysis() -> PeerRate:
    """Time llm-analysis on GPT-3 175B and A100."""
    name = "llm-analysis"
    try:
        from llm_analysis import analysis, config
    except ImportError as error:
        reason = f"not installed ({error.name} is missing): pip install --no-deps llm-analysis fire"
        return PeerRate(name=name, note=f"{reason} termcolor")
    model = config.ModelConfig(
        name="gpt", num_layers=96, n_head=96, hidden_dim=12288, vocab_size=51200, max_seq_len=2048
    )
    gpu = config.get_gpu_config_by_name("a100-sxm-80gb")
    dtype = config.get_dtype_config_by_name("w16a16e16")

    def price(degrees: tuple[int, int, int, int]) -> object:
        tp, pp, dp, micro_batch = degrees
        layout = config.ParallelismConfig(tp_size=tp, pp_size=pp, dp_size=dp)
        analysed = analysis.LLMAnalysis(
            model, gpu, dtype, layout, flops_efficiency=0.5, hbm_memory_efficiency=0.8
        )
        return analysed.training(
            batch_size_per_gpu=micro_batch, global_batch_size=8 * micro_batch * dp, seq_len=2048
        )

    grid = itertools.product(DEGREES, DEGREES, range(1, 65), (1, 2, 4, 8))
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        return _timed(name, price, iter(grid), "PyPI, as its documentation drives it")
    except Exception as error:  # a peer's own failure is its result
        return PeerRate(name=name, note=f"failed: {type(error).__name__}: {error}")
    finally:
        logging.disable(level)


def calculon(checkout: Path | None) -> PeerRate:
    """Time Calculon on its own validation executions, from a checkout of its repository."""
    name = "Calculon"
    if checkout is None:
        return PeerRate(name=name, note="not run: give the path of a checkout with --calculon")
    try:
        model, system = _first(checkout, "gpt3-175B.json"), _first(checkout, "a100_80g.json")
        execution = _first(checkout, "gpt3-175B_full.json")
        sys.path.insert(0, str(checkout))
        try:
            from calculon.llm import Llm  # type: ignore[import-not-found]
            from calculon.system import System  # type: ignore[import-not-found]
        finally:
            sys.path.remove(str(checkout))
        application = Llm.Application(model)
        machine = System(system)
        logger = logging.getLogger("calculon")

        def price(micro_batch: int) -> object:
            plan = Llm.Execution.from_json({**execution, "microbatch_size": micro_batch})
            llm = Llm(application, logger)
            with contextlib.suppress(Llm.Error):  # "does not fit" is an answer, too
                llm.compile(machine, plan)
                llm.run(machine)
            return llm

        sizes = itertools.cycle((1, 2, 4, 8))
        return _timed(name, price, sizes, f"checkout {checkout}")
    except Exception as error:  # a peer's own failure is its result
        return PeerRate(name=name, note=f"failed: {type(error).__name__}: {error}")


def _first(checkout: Path, file: str) -> dict[str, Any]:
    """Return the first JSON file of that name, wherever the checkout keeps it."""
    paths = sorted(checkout.rglob(file))
    if not paths:
        raise FileNotFoundError(f"{checkout} holds no {file}")
    document: dict[str, Any] = json.loads(paths[0].read_text(encoding="utf-8"))
    return document
