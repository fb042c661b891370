"""How fast data are prepared: tokenising, packing, looking up rows, feeding a rank.

The corpus is made on the spot from the grammar of the shipped tales. Seconds are CPU seconds of
this process and of those it started, so that a busy machine tells the same; the time on the clock
is given beside them.
"""

from __future__ import annotations

import json
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tutti.huggingface.tokenizer import Tokenizer
from tutti.models import read_config
from tutti.train.data.cache import CacheSettings, open_store
from tutti.train.data.config import SourceConfig
from tutti.train.data.order import DataPart, TrainingOrder
from tutti.train.data.packing import CutRows, FitRows
from tutti.train.data.row import Row
from tutti.train.data.store import TokenStore
from tutti.train.data.synthetic import SyntheticRows
from tutti.train.data.text.tales import tale

_ROW = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One thing that was timed."""

    what: str
    tokens: int
    cpu_s: float
    clock_s: float


def _cpu_s() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    used = [resource.getrusage(kind) for kind in kinds]
    return sum(one.ru_utime + one.ru_stime for one in used)


def timed(what: str, work: Callable[[], int]) -> Speed:
    """Time something that returns how many tokens it dealt with."""
    cpu, clock = _cpu_s(), time.perf_counter()
    tokens = work()
    return Speed(
        what=what, tokens=tokens, cpu_s=_cpu_s() - cpu, clock_s=time.perf_counter() - clock
    )


def measure(tokenizers: list[Tokenizer], megabytes: float) -> Iterator[Speed]:
    """Yield each figure as it is there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder, megabytes * 1e6)
        for number, tokenizer in enumerate(tokenizers):
            for processes in (1, 2):
                said = f"tokenise text, {tokenizer.name}, {processes} process" + "es" * (
                    processes > 1
                )
                where = CacheSettings(folder=folder / f"{number}.{processes}", processes=processes)
                yield timed(said, lambda t=tokenizer, w=where: _tokenised("a", t, w, folder))  # type: ignore[misc]
        first = CacheSettings(folder=folder / "0.1", processes=1)
        yield timed(
            f"tokenise chat, {tokenizers[0].name}, 1 process",
            lambda: _tokenised("chat", tokenizers[0], first, folder),
        )
        text, chat = (_store(name, tokenizers[0], first, folder) for name in ("a", "chat"))
        yield from _packing(text, chat, tokenizers[0])
    yield from _feeding()


def _write(folder: Path, num_bytes: float) -> None:
    chance, written = random.Random(0), 0
    with (folder / "a.jsonl").open("w") as text, (folder / "chat.jsonl").open("w") as chat:
        while written < num_bytes:
            one, other = tale(chance), tale(chance)
            written += text.write(json.dumps({"text": one}) + "\n")
            turns = [("user", one[:200]), ("assistant", other[: 100 + written % 900])]
            messages = [{"role": role, "content": content} for role, content in turns]
            chat.write(json.dumps({"messages": messages}) + "\n")


def _store(name: str, tokenizer: Tokenizer, where: CacheSettings, folder: Path) -> TokenStore:
    return open_store(SourceConfig(path=f"{name}.jsonl"), tokenizer, where, base=folder)


def _tokenised(name: str, tokenizer: Tokenizer, where: CacheSettings, folder: Path) -> int:
    return _store(name, tokenizer, where, folder).num_tokens


def _packing(text: TokenStore, chat: TokenStore, tokenizer: Tokenizer) -> Iterator[Speed]:
    made: list[FitRows] = []
    size = tokenizer.size

    def fit() -> int:
        made.append(FitRows(chat, _ROW, pad=tokenizer.pad, vocabulary=size, long="truncate"))
        return made[0].report.tokens

    yield timed("fit examples into rows", fit)
    for what, rows in (
        ("rows of cut documents, shuffled", CutRows(text, _ROW, pad=0, vocabulary=size)),
        ("rows of whole examples, shuffled", made[0]),
    ):
        part = DataPart(rows, seed=0, number=0, first=0, count=rows.num_rows)
        order = TrainingOrder([part], [1.0])
        yield timed(what, lambda o=order, n=rows.num_rows: _read(o.row, n))  # type: ignore[misc]


def _read(row: Callable[[int], Row], count: int) -> int:
    return sum(len(row(sample).tokens) for sample in range(count))


def _feeding() -> Iterator[Speed]:
    from tutti.accelerator import open_accelerator
    from tutti.train.data.feeder import Feeder

    accelerator = open_accelerator("cpu")
    config = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2,
              "num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 1024}  # fmt: skip
    spec = read_config(config, "bench")
    for length, rows in ((128, 64), (2048, 4)):
        samples = SyntheticRows(
            vocabulary=1024, length=length, document_length=0, surprise=0.1, seed=0
        )

        def feed(samples: SyntheticRows = samples, rows: int = rows) -> int:
            tokens = 0
            with Feeder(
                samples, spec, accelerator, lambda step, _: range(step * rows, (step + 1) * rows),
                micro_batches=1,
            ) as feeder:  # fmt: skip
                for step in range(200):
                    tokens += feeder.batch(step, 0).num_tokens
            return tokens

        yield timed(f"feed synthetic rows of {length} as batches on the CPU", feed)
        yield timed(
            f"synthetic rows of {length} alone",
            lambda s=samples: _read(s.row, 2_000_000 // s.length),  # type: ignore[misc]
        )


def per_second(speed: Speed) -> float:
    """Return tokens per CPU second."""
    return float(speed.tokens / max(speed.cpu_s, np.finfo(float).tiny))
