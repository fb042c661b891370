"""Seconds of a step on one stage: units of a model on the chips of one pool, sliced over tp.

Products and element-wise operators are those that `tutti.nn` calls, over a grid of token counts;
attention follows from the keys that a step reads. Prices are nominal where no profile is given.
"""

from __future__ import annotations

import bisect
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tutti.batching.step_sizes import FEW_LONG, LARGEST, decode_rows, mixed_rows, mixed_tokens
from tutti.cost.arrays import FloatArray, Machine, Number, Strategy
from tutti.cost.measured.calls import Call, block_calls, embedding_calls
from tutti.cost.measured.chip import MeasuredChip
from tutti.cost.measured.forms import FORMS, Direction
from tutti.cost.network.closed_forms import all_reduce_seconds
from tutti.cost.operators.operator_times import flash_rate, gemm_seconds, memory_bound_seconds
from tutti.cost.serving.constants import (
    ServingConstants,
    captured_constants,
    serving_constants,
)
from tutti.cost.serving.measured_attention import PagedTables
from tutti.cost.serving.step_load import StepLoad, windows_of
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.pool import Pool
from tutti.models.anatomy import rank_kv_heads
from tutti.models.cached import cached_bytes
from tutti.models.parts import AttentionSpec
from tutti.models.spec import ModelSpec

STREAM_BYTES = 2.0  # of activations
_GRID = np.unique(np.round(2.0 ** np.arange(0.0, 16.01, 0.125))).astype(np.float64)
_COUNTS: list[float] = _GRID.tolist()
_NARROW = (Dtype.FP8, Dtype.INT8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """In which numbers weights and pages are held; None: as activations are."""

    weights: Dtype | None = None
    cache: Dtype | None = None

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight of a product."""
        return STREAM_BYTES if self.weights is None else self.weights.num_bytes

    @property
    def cache_bytes(self) -> float:
        """Bytes of a number in pages."""
        return STREAM_BYTES if self.cache is None else self.cache.num_bytes


class _Attention(NamedTuple):
    """Layers of one kind: seconds per key that a decode reads, and per pair of a chunk."""

    window: int  # its place among the model's windows
    layers: int
    key_s: float
    pair_s: float
    row_s: float
    tables: PagedTables | None = None  # measured: instead of what stands above

    def seconds(self, load: StepLoad) -> float:
        keys, pairs = load.keys[self.window], load.pairs[self.window]
        if self.tables is not None:
            each = self.tables.seconds(load.rows, keys, load.tokens - load.rows, pairs)
        else:
            each = self.key_s * keys + self.pair_s * pairs + self.row_s * load.rows
        return self.layers * each


class StageCurves(NamedTuple):
    """A stage's nominal prices as numbers, for loops that are compiled."""

    counts: FloatArray
    products: FloatArray  # seconds of so many tokens
    head: FloatArray  # of so many wanted rows; zeros where it is elsewhere
    attention: FloatArray  # of each kind: layers, seconds per key, per pair, per row


class StagePrices:
    """Prices steps on one stage."""

    def __init__(
        self,
        model: ModelSpec,
        units: tuple[int, int],
        cluster: Cluster,
        pool: Pool,
        *,
        tp: int = 1,
        formats: Formats | None = None,
        measured: MeasuredChip | None = None,
        own: ServingConstants | None = None,
    ) -> None:
        self.model, self.units, self.pool, self.tp = model, units, pool, tp
        formats = formats or Formats()
        self.token_bytes = cached_bytes(
            model, self.blocks, tp=tp, stored=formats.cache_bytes, stream=STREAM_BYTES
        )
        self.own = own or serving_constants(pool.chip)
        self._constants = captured_constants(pool.chip, self.own)
        self._machine = Machine.of(cluster, pool, Dtype.BF16)
        self._measured = measured
        self._serves = measured is not None and measured.serves
        # steps that run as graphs are filled up to sizes
        self._fills = self._serves and measured is not None and measured.profile.served_graphs
        windows = windows_of(model)
        kinds = Counter(model.layer_blocks[unit - 1] for unit in self.blocks)
        every = [
            _kind_seconds(self, index, formats) * count for index, count in sorted(kinds.items())
        ]
        products = sum(every, np.zeros(len(_GRID)))
        if units[0] == 0:
            products = products + self._calls(embedding_calls(model, _strategy(tp)), formats)
        self._products: list[float] = products.tolist()
        self._head: list[float] | None = _head_seconds(self).tolist() if self.has_head else None
        # what a step does beside its units: places of keys, rows that are wanted, stop tokens
        self._fixed_s = self.own.step_kernels * self.own.graph_kernel_s if self._fills else 0.0
        self._attention = [
            self._attention_prices(model.blocks[index].attention, count, windows, formats)
            for index, count in sorted(kinds.items())
        ]

    @property
    def blocks(self) -> range:
        """The blocks of the stage, as units."""
        return range(max(1, self.units[0]), min(self.units[1], self.model.num_layers + 1))

    @property
    def kind(self) -> tuple[object, ...]:
        """What stages have in common whose steps take as long."""
        kinds = Counter(self.model.layer_blocks[unit - 1] for unit in self.blocks)
        own = (self.pool.name, self.tp, self.units[0] == 0, self.has_head)
        return (*own, tuple(sorted(kinds.items())))

    @property
    def has_head(self) -> bool:
        """Whether logits are computed here."""
        return self.units[1] > self.model.head_unit

    @property
    def is_nominal(self) -> bool:
        """Whether `curves` say what its steps take."""
        return not self._fills and all(part.tables is None for part in self._attention)

    def curves(self) -> StageCurves:
        """Return its prices as numbers."""
        return StageCurves(
            _GRID,
            np.array(self._products),
            np.zeros(len(_GRID)) if self._head is None else np.array(self._head),
            np.array([a[1:5] for a in self._attention], np.float64).reshape(-1, 4),
        )

    @property
    def basis(self) -> str:
        """What the prices rest on."""
        if self._measured is None:
            return "nominal"
        profile = self._measured.profile
        rest = "" if self._serves else "; attention to pages nominal"
        return f"profile of {profile.chip} ({profile.date}){rest}"

    def seconds(self, load: StepLoad) -> float:
        """Return the seconds of a step on this stage."""
        if not load.tokens:
            return 0.0
        tokens, samples = self._filled(load)
        total = _at(tokens, self._products) + self._fixed_s
        for part in self._attention:
            total += part.seconds(load)
        if self._head is not None and load.samples:
            total += _at(samples, self._head)
        return total

    def move_seconds(self, load: StepLoad, page_size: int) -> float:
        """Return the seconds in which pages move to the host and back, each chip its own part."""
        host = self.pool.node.host
        if not (load.stows or load.fetches):
            return 0.0
        moved = (load.stows + load.fetches) * page_size * self.token_bytes
        ways = (load.stows > 0) + (load.fetches > 0)
        return moved / host.device_bandwidth + ways * host.device_latency_s

    def _filled(self, load: StepLoad) -> tuple[int, int]:
        """Return the tokens and the wanted rows of a step as it runs."""
        if not self._fills:
            return load.tokens, load.samples
        if load.tokens == load.rows:
            rows = decode_rows(load.rows)
            return rows, rows
        rows = mixed_rows(load.samples, few=load.samples - load.rows <= FEW_LONG)
        return mixed_tokens(max(load.tokens, rows), load.tokens + rows + LARGEST), rows

    # --- what it is made of ------------------------------------------------------------------

    def _calls(self, calls: Sequence[Call], formats: Formats) -> FloatArray:
        """Return the seconds of operators over the grid of tokens; attention is priced apart."""
        total = np.zeros(len(_GRID))
        for call in calls:
            if call.operator == "attention" or not np.any(call.times):
                continue
            total = total + call.times * self._call_seconds(call, formats)
        return total

    def _call_seconds(self, call: Call, formats: Formats) -> FloatArray:
        if self._measured is not None and formats.weights is None:
            direction: Direction = "inference" if self._serves else "forward"
            return self._measured.seconds(call.operator, direction, call.dims)
        if self._serves and self._measured is not None:
            name = _of_weights(call, formats)
            if name != "grouped_linear" and self._measured.stand_in(name, "inference") is None:
                return self._measured.seconds(name, "inference", call.dims)
        if call.operator == "linear":
            rows, out, deep = call.dims
            narrow = formats if call.may_narrow else Formats()
            return self.product_seconds(rows, out, deep, narrow)
        if call.operator == "grouped_linear":
            rows, out, deep, experts = call.dims
            # few rows meet few experts: only the weights of those are read
            met = experts * (1.0 - (1.0 - 1.0 / experts) ** rows)
            rate = self._constants.moe_gemm_ratio
            return self.product_seconds(rows / met, out, deep, formats, batch=met, rate=rate)
        elements = FORMS[call.operator].elements(call.dims)
        return memory_bound_seconds(elements * STREAM_BYTES, self._machine, self._constants)

    def product_seconds(
        self,
        rows: Number,
        out: Number,
        deep: Number,
        formats: Formats,
        *,
        batch: Number = 1.0,
        rate: Number = 1.0,
    ) -> FloatArray:
        """Return a product of few or many rows; of narrow weights only these take less memory."""
        if formats.weights in _NARROW and self.pool.chip.supports(formats.weights):
            rate = rate * self._constants.fp8_speedup
        return gemm_seconds(
            rows, out, deep, self._machine, self._constants,
            batch=batch, rate=rate, element_bytes=formats.weight_bytes,
        )  # fmt: skip

    def all_reduce(self, tokens: Number) -> FloatArray:
        """Return one sum over the tensor-parallel ranks of the stream of so many tokens."""
        moved = np.asarray(tokens) * self.model.hidden * STREAM_BYTES
        return all_reduce_seconds(moved, self.tp, 1.0, self._machine, self._constants)

    def head_product(self, rows: Number, out: Number, deep: Number) -> FloatArray:
        """Return a product towards logits; its numbers are those of activations."""
        if self._serves and self._measured is not None:
            return self._measured.seconds("linear", "inference", (rows, out, deep))
        return self.product_seconds(rows, out, deep, Formats())

    def sampling_seconds(self, rows: Number) -> FloatArray:
        """Return the seconds of choosing tokens from logits, each rank from its own."""
        if self._serves and self._measured is not None:
            dims = (rows, np.ceil(self.model.vocab / self.tp))
            return self._measured.seconds("sample", "inference", dims)
        logits = np.asarray(rows) * np.ceil(self.model.vocab / self.tp)
        moved = logits * self.own.logit_bytes
        return memory_bound_seconds(moved, self._machine, self._constants, kernels=8.0)

    def _attention_prices(
        self,
        part: AttentionSpec,
        layers: int,
        windows: tuple[int | None, ...],
        formats: Formats,
    ) -> _Attention:
        machine, constants = self._machine, self._constants
        unit = next(u for u in self.blocks if self.model.block(u).attention == part)
        stored = cached_bytes(
            self.model, (unit,), tp=self.tp, stored=formats.cache_bytes, stream=STREAM_BYTES
        )
        rate = float(machine.memory_bandwidth) * self.own.paged_efficiency
        heads = part.heads / self.tp
        wide = part.head_dim + part.value_dim
        flash = float(flash_rate(part.head_dim, machine, constants))
        latent = part.latent
        # decodes over latents multiply with the latents themselves, for every head
        met = wide if latent is None else 2 * latent.kv_rank + latent.rope_dim
        tables = None
        if self._serves and latent is None and formats.cache is None and self._measured:
            kv_heads = float(np.asarray(rank_kv_heads(part.kv_heads, float(self.tp))))
            shape = (heads, kv_heads, float(part.head_dim), float(part.value_dim))
            tables = PagedTables.of(self._measured, shape)
        return _Attention(
            window=windows.index(part.window),
            layers=layers,
            key_s=max(stored / rate, 2.0 * heads * met / flash),
            pair_s=2.0 * heads * wide / flash,
            row_s=self.own.row_s,
            tables=tables,
        )


def _at(count: int, curve: Sequence[float]) -> float:
    """Return a curve over the grid at a count; beyond it, by the last rate."""
    if count >= _COUNTS[-1]:
        return curve[-1] * count / _COUNTS[-1]
    place = bisect.bisect_right(_COUNTS, count)
    low, high = _COUNTS[place - 1], _COUNTS[place]
    part = (count - low) / (high - low)
    return curve[place - 1] + part * (curve[place] - curve[place - 1])


def _of_weights(call: Call, formats: Formats) -> str:
    """Return what a product of narrow weights is called in a profile."""
    if call.operator != "linear" or not call.may_narrow or formats.weights is None:
        return call.operator
    return f"{formats.weights.value}_linear"


def _strategy(tp: int) -> Strategy:
    return Strategy.filled(sequence_length=1.0, sequences=_GRID, tp=float(tp))


def _kind_seconds(stage: StagePrices, index: int, formats: Formats) -> FloatArray:
    """Return one block of a kind over the grid, its collectives and page writes included."""
    model = stage.model
    calls = block_calls(model, model.blocks[index], _strategy(stage.tp), serves=True)
    total = stage._calls(calls, formats)
    if not stage._serves:  # attention is a kernel and a pass over its splits
        total = total + 2.0 * stage.own.graph_kernel_s
    elif stage._measured is not None:
        between = sum(1 for call in calls if np.any(call.times)) + 1
        total = total + between * stage._measured.profile.served_gap_s
    if stage.tp > 1:
        total = total + 2.0 * stage.all_reduce(_GRID)
    return total


def _head_seconds(stage: StagePrices) -> FloatArray:
    """Return norm, logits and sampling of so many rows; logits stay in activations' numbers."""
    model, rows = stage.model, _GRID
    vocabulary = np.ceil(model.vocab / stage.tp)
    width = model.embedding.dim
    total = stage.head_product(rows, vocabulary, float(width))
    if width != model.hidden:
        total = total + stage.head_product(rows, float(width), float(model.hidden))
    return total + stage.sampling_seconds(rows)


@functools.lru_cache(maxsize=4096)
def stage_prices(
    model: ModelSpec,
    units: tuple[int, int],
    cluster: Cluster,
    pool: str,
    tp: int,
    formats: Formats,
    measured: MeasuredChip | None = None,
) -> StagePrices:
    """Return the prices of a stage, made once."""
    return StagePrices(
        model, units, cluster, cluster.pool(pool), tp=tp, formats=formats, measured=measured
    )
