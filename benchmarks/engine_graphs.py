"""Training steps with blocks as graphs, beside the same steps with every kernel issued by itself.

    python benchmarks/engine_graphs.py          # on a machine with a GPU, about 40 s

Few layers of the 1B shape with a small vocabulary, so that blocks are what is timed. Per number of
tokens: milliseconds per step without and with graphs, what `capture: auto` chooses, how far losses
and gradient norms are apart, peak memory, and what the graphs hold. Both run the same kernels, but
attention's backward is not deterministic on a GPU: two runs without graphs show what that alone
does, and a last pair with attention that is deterministic must agree bit for bit. Ends with 1 where
it does not. The last rows check, by torch's own means, that no step makes the host wait while it is
issued.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from typing import Any

import torch

from tutti.accelerator import Accelerator, open_accelerator
from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.models import read_config
from tutti.models.load import catalog_config
from tutti.nn.batch import Batch
from tutti.plan.job import PRECISIONS
from tutti.ranks.single_rank import NoLinks, plan_alone
from tutti.train.data.feeder import to_batch
from tutti.train.engine.engine import Engine
from tutti.train.graphs.captured_blocks import CaptureMode, CaptureSettings

SETTINGS = AdamSettings(learning_rate=1e-4, weight_decay=0.1)
WARM_UP = 4  # the first as it is, the second timed, the third captured, one replayed
FAR = 5e-3  # relative; losses and norms in bf16 over a dozen steps, at least tolerated


def add_arguments(
    parser: argparse.ArgumentParser, *, layers: int, vocabulary: int, micro_batches: int
) -> None:
    """Let a command line say what `make_engine` makes, unless it is what the caller wants."""
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--vocabulary", type=int, default=vocabulary)
    parser.add_argument("--micro-batches", type=int, default=micro_batches)
    parser.add_argument("--device", default=None)


def make_engine(
    asked: argparse.Namespace, tokens: int, mode: CaptureMode, accelerator: Accelerator
) -> tuple[Engine, list[str]]:
    """Return an engine and what it says of graphs."""
    config = dict(catalog_config(asked.model))
    config |= {"num_hidden_layers": asked.layers, "vocab_size": asked.vocabulary}
    spec = read_config(config, asked.model)
    plan = plan_alone(
        spec,
        sequence_length=tokens,
        micro_batch=1,
        micro_batches=asked.micro_batches,
        precision=PRECISIONS["pure_bf16"],
    )
    said: list[str] = []
    engine = Engine(
        plan, spec, 0, accelerator, NoLinks(), clip_norm=1.0,
        capture=CaptureSettings(mode=mode, say=said.append),
    )  # fmt: skip
    accelerator.seed(1)
    with torch.no_grad():  # on the chip: many engines are made
        for parameter in engine.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0)
    engine.take_masters()
    return engine, said


def batches(engine: Engine, tokens: int, count: int) -> list[Batch]:
    """Return random batches; every engine gets the same."""
    generator = torch.Generator().manual_seed(5)
    made: list[Batch] = []
    for _ in range(count):
        drawn = torch.randint(engine.spec.vocab, (tokens + 1,), generator=generator)
        drawn = drawn.to(engine.accelerator.device)
        like = made[0] if made else None
        made.append(Batch.of(engine.spec, drawn[:-1], [tokens], targets_t=drawn[1:], like=like))
    return made


def timed(asked: argparse.Namespace, tokens: int, mode: CaptureMode, chip: Accelerator) -> Any:
    """Train with or without graphs."""
    gc.collect()
    chip.empty_cache()
    chip.reset_peak()
    engine, said = make_engine(asked, tokens, mode, chip)
    given = batches(engine, tokens, asked.micro_batches)
    seconds, results = [], []
    for step in range(WARM_UP + asked.steps):
        if step == WARM_UP:
            chip.synchronize()
        begin = time.perf_counter()
        results.append(engine.step(given.__getitem__, SETTINGS))
        seconds.append(time.perf_counter() - begin)
    chip.synchronize()
    assert engine.graphs is not None
    return {
        "ms": 1e3 * statistics.median(seconds[WARM_UP:]),
        "losses": [r.loss for r in results],
        "norms": [r.gradient_norm for r in results],
        "peak_gib": chip.memory().peak / 2**30,
        "held_gib": engine.graphs.held_bytes / 2**30,
        "extra_gib": engine.graphs.extra_bytes / 2**30,
        "active": engine.graphs.active,
        "said": said,
    }


def decision(asked: argparse.Namespace, tokens: int, chip: Accelerator) -> str:
    """Return what `auto` chooses, in its own words."""
    engine, said = make_engine(asked, tokens, "auto", chip)
    given = batches(engine, tokens, asked.micro_batches)
    for _ in range(3):
        engine.step(given.__getitem__, SETTINGS)
    return "; ".join(said) or "nothing was said"


def waits(asked: argparse.Namespace, mode: CaptureMode, chip: Accelerator, *, packed: bool) -> str:
    """Return what makes the host wait while a step is issued; "nothing" is wanted.

    Batches come from pinned memory, as a feeder brings them; packed ones hold documents of any
    length.
    """
    engine, _ = make_engine(asked, 1024, mode, chip)
    both = chip.pinned((2, 1024), torch.int64)
    both.copy_(torch.randint(engine.spec.vocab, (2, 1024)))
    number = 0

    def batch(_: int) -> Batch:
        lengths = (300 + number, 724 - number) if packed else (1024,)
        return to_batch(engine.spec, chip, both, (lengths,))

    for _ in range(3):
        number += 1
        engine.step(batch, SETTINGS)
    issue = engine.issue

    def watched() -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            issue()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.issue = watched  # type: ignore[method-assign]
    try:
        number += 1
        engine.step(batch, SETTINGS)
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = [f"{f.filename.rpartition('tutti/')[2]}:{f.lineno}" for f in frames[-4:]]
        return f"{str(error).splitlines()[0]} at {' < '.join(reversed(where))}"
    return "nothing"


def apart(one: list[float], other: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, layers=4, vocabulary=8192, micro_batches=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    asked = parser.parse_args()
    chip = open_accelerator(asked.device)
    rows, wrong = [], False
    for tokens in asked.tokens:
        off, again, on = (timed(asked, tokens, mode, chip) for mode in ("off", "off", "on"))
        loss, norm = apart(off["losses"], on["losses"]), apart(off["norms"], on["norms"])
        control = apart(off["losses"], again["losses"]), apart(off["norms"], again["norms"])
        right = loss <= max(FAR, 5 * control[0]) and norm <= max(FAR, 5 * control[1])
        wrong |= not right or not on["active"]
        row = {
            "tokens": tokens, "issued_ms": off["ms"], "captured_ms": on["ms"],
            "gain": off["ms"] / on["ms"], "loss_apart": loss, "norm_apart": norm,
            "loss_apart_without": control[0], "norm_apart_without": control[1],
            "issued_peak_gib": off["peak_gib"], "captured_peak_gib": on["peak_gib"],
            "held_gib": on["held_gib"], "extra_gib": on["extra_gib"],
            "said": on["said"], "auto": decision(asked, tokens, chip),
        }  # fmt: skip
        rows.append(row)
        print(
            f"{tokens:6,d} tokens: {row['issued_ms']:7.2f} ms issued, {row['captured_ms']:7.2f} ms "
            f"captured, {row['gain']:.2f}×; loss {loss:.1e}, norm {norm:.1e} apart "
            f"({control[0]:.1e}, {control[1]:.1e} without graphs)"
            f"{'' if right else '  TOO FAR'}; {row['auto']}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        if not on["active"]:
            print(f"  not captured: {'; '.join(on['said'])}", file=sys.stderr)
    os.environ["TUTTI_OPERATORS"] = "attention=reference"
    exact = open_accelerator(asked.device)
    off, on = (
        timed(asked, sorted(asked.tokens)[len(asked.tokens) // 2], mode, exact)
        for mode in ("off", "on")
    )
    del os.environ["TUTTI_OPERATORS"]
    same = (off["losses"], off["norms"]) == (on["losses"], on["norms"]) and on["active"]
    print(f"deterministic attention: {'the same bits' if same else 'DIFFERENT'}", file=sys.stderr)
    wrong |= not same
    host_waits = {}
    if chip.device.type == "cuda":
        host_waits = {
            "issued": waits(asked, "off", chip, packed=False),
            "captured": waits(asked, "on", chip, packed=False),
            "packed documents": waits(asked, "off", chip, packed=True),
        }
        for kind, found in host_waits.items():
            print(f"host waits while issuing, {kind}: {found}", file=sys.stderr)
    wrong |= any(found != "nothing" for found in host_waits.values())
    json.dump({"rows": rows, "same_bits": same, "host_waits": host_waits}, sys.stdout, indent=1)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
