"""What watching a run costs: CPU seconds of its parts, and of reading its series.

A step of a rank is an event when an instruction starts, one when it was issued, a wait in every
third, and a beat of the pulse; beside the steps a host is sampled by the second into its store.
Shares are of one core, of a step that takes a second and has 400 instructions.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tutti.errors import TuttiError
from tutti.observe.pulse import Pulse
from tutti.observe.rank_series import FILE, JOB, rank_names
from tutti.observe.ring import Kind, Listed, Ring
from tutti.observe.samplers.sampling import Rates
from tutti.observe.samplers.this_host import host_samplers
from tutti.observe.store import SeriesStore

INSTRUCTIONS = 400
BEGIN = 1_800_000_000
RANKS, FIGURES, SECONDS = 1000, 8, 600
HOST_FIGURES, HOST_SECONDS = 200, 3600


def least(work: Callable[[], object], *, times: int = 5) -> float:
    """Return the least CPU seconds of some runs: others on the machine only lengthen one."""
    spent = []
    for _ in range(times):
        began = time.process_time()
        work()
        spent.append(time.process_time() - began)
    return min(spent)


def records(folder: Path) -> dict[str, float]:
    """Return the seconds of one event of the ring, and of one beat of the pulse."""
    listed = [Listed(words=f"Forward {i}", lane="compute") for i in range(INSTRUCTIONS)]
    ring = Ring(folder / "rank.ring", rank=0, world=1, instructions=listed)
    pulse = Pulse(folder / "rank.pulse", rank=0)
    count = 100_000

    def notes() -> None:
        for i in range(count):
            ring.note(Kind.START, i % INSTRUCTIONS)

    def beats() -> None:
        for i in range(count):
            pulse.at(i % INSTRUCTIONS)

    costs = {"event_s": least(notes) / count, "beat_s": least(beats) / count}
    ring.close()
    pulse.close()
    return costs


def sampled(folder: Path) -> dict[str, float]:
    """Return the CPU seconds of one second's sample of this host, and of storing it."""
    samplers, rates = host_samplers(lambda _: None), Rates()
    store = SeriesStore(folder / "host.sqlite")

    def sample() -> dict[str, float]:
        values: dict[str, float] = {}
        for sampler in samplers:
            values |= sampler.sample()
        return rates.of(values, time.monotonic())

    count = len(sample())
    sample_s = least(sample, times=15)
    values = {f"figure_{i}": float(i) for i in range(count)}
    began = time.process_time()
    for second in range(120):
        store.append("host", BEGIN + second, values)
        store.flush(summaries=second % 60 == 59)
    stored_s = (time.process_time() - began) / 120
    store.close()
    return {"figures": count, "sample_s": sample_s, "stored_s": stored_s}


def ranks_series(folder: Path) -> dict[str, float]:
    """Return what a run of a thousand ranks costs: to write, to keep, to read one figure."""
    path = folder / FILE
    store, names = SeriesStore(path), rank_names(RANKS)
    noise = np.random.default_rng(0)
    rows = noise.normal(1.0, 0.03, (SECONDS, len(names))).astype(np.float32)
    began = time.process_time()
    for second, row in enumerate(rows):
        store.append_row(JOB, BEGIN + second, names, row)
        if second % 60 == 59:  # as often as its thread may, of its fiftieth of the time
            store.flush(summaries=False)
    store.close()
    spent = time.process_time() - began
    points = SECONDS * len(names)
    again = SeriesStore(path, read_only=True)
    read_s = least(lambda: again.read("tutti_rank_compute_seconds", BEGIN, BEGIN + SECONDS))
    series = again.read("tutti_rank_compute_seconds", BEGIN, BEGIN + SECONDS)
    if len(series) != RANKS or any(len(one.seconds) != SECONDS for one in series):
        raise TuttiError("the store does not give back what was written")
    again.close_reading()
    return {
        "points": points, "points_per_cpu_s": points / spent,
        "core_at_40k": 40_000 * spent / points, "bytes_per_point": path.stat().st_size / points,
        "read_1000_ranks_s": read_s,
    }  # fmt: skip


def hour(folder: Path) -> dict[str, float]:
    """Return the CPU seconds of reading an hour of one of a host's series."""
    path = folder / "hour.sqlite"
    store = SeriesStore(path)
    noise = np.random.default_rng(1)
    names = tuple(f"figure_{i}" for i in range(HOST_FIGURES))
    for second in range(HOST_SECONDS):
        row = noise.normal(50, 5, len(names)).astype(np.float32)
        store.append_row("host", BEGIN + second, names, row)
    store.close()
    again = SeriesStore(path, read_only=True)
    spent = least(lambda: again.read("figure_7", BEGIN, BEGIN + HOST_SECONDS))
    (one,) = again.read("figure_7", BEGIN, BEGIN + HOST_SECONDS)
    if len(one.seconds) != HOST_SECONDS:
        raise TuttiError("the store does not give back what was written")
    again.close_reading()
    return {"read_hour_s": spent}


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchingFigure:
    """One figure of the table, in the unit that its words say, and its bar."""

    words: str
    value: float
    bar: float | None = None


def watching_figures() -> list[WatchingFigure]:
    """Measure all of it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        costs = records(folder) | sampled(folder) | ranks_series(folder) | hour(folder)
    step = INSTRUCTIONS * ((2 + 1 / 3) * costs["event_s"] + costs["beat_s"])
    share = step + costs["sample_s"] + costs["stored_s"]
    rows: tuple[tuple[str, float, float | None], ...] = (
        ("an event of the ring, µs", 1e6 * costs["event_s"], 2),
        ("a beat of the pulse, µs", 1e6 * costs["beat_s"], None),
        (
            f"a sample of {costs['figures']:.0f} figures of a host, ms",
            1e3 * costs["sample_s"],
            None,
        ),
        ("storing it, a flush each second, ms", 1e3 * costs["stored_s"], None),
        ("ring, pulse, samplers and store, % of a step of 1 s", 100 * share, 1),
        ("40,000 points a second, % of a core", 100 * costs["core_at_40k"], 5),
        ("bytes a point, 3 % noise", costs["bytes_per_point"], 2.5),
        ("reading an hour of one series, ms", 1e3 * costs["read_hour_s"], 100),
        (
            "reading one figure of 1,000 ranks, 10 minutes, ms",
            1e3 * costs["read_1000_ranks_s"],
            300,
        ),
    )
    return [WatchingFigure(words=words, value=value, bar=bar) for words, value, bar in rows]
