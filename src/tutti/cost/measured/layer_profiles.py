"""Per-layer profiles: measured seconds and bytes of every unit, by chip, tp and micro-batch.

One JSON file per measurement, `{chip}_tp{t}_bs{sequences}.json`, in the format of the Metis and
Sailor planners: forward and backward of each unit in ms, the unit's bytes in MB, the optimizer
step of the whole model in ms. `LayerProfiles` reads a folder of them and looks figures up, between
measured micro-batches by straight lines. How they price a plan is `profiled`'s business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt

from tutti import files
from tutti.document import AtLeast, Count, Place, build_fields
from tutti.errors import InputError, hint
from tutti.hardware.chip import Chip

FloatArray = npt.NDArray[np.float64]
# The files say MB and mean MiB: in the published ones, the embedding's figure is exactly
# 5 × its parameter bytes + its activation bytes, over 2²⁰.
MEGABYTE = 2.0**20
_MILLISECOND = 1e-3
# Where one micro-batch alone was measured: parameters, gradients and Adam's two moments.
_STATE_COPIES = 4.0
_NAME = re.compile(r"(?P<chip>\w[\w.+-]*?)_tp(?P<tp>[1-9]\d{0,5})_bs(?P<batch>[1-9]\d{0,5})\.json")

_Positive = Annotated[float, AtLeast(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameters:
    total_parameters_bytes: _Positive
    parameters_per_layer_bytes: tuple[_Positive, ...]
    activation_parameters_bytes: tuple[_Positive, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    model_name: str
    num_layers: Count
    parameters: _Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class _Time:
    total_time_ms: _Positive
    forward_backward_time_ms: _Positive
    batch_generator_time_ms: _Positive
    optimizer_time_ms: _Positive
    layer_compute_total_ms: tuple[_Positive, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    layer_memory_total_mb: tuple[_Positive, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """What a file holds."""

    model: _Model
    execution_time: _Time
    execution_memory: _Memory

    def __post_init__(self) -> None:
        wanted = self.model.num_layers
        parameters = self.model.parameters
        for name, values in (
            ("parameters_per_layer_bytes", parameters.parameters_per_layer_bytes),
            ("activation_parameters_bytes", parameters.activation_parameters_bytes),
            ("layer_compute_total_ms", self.execution_time.layer_compute_total_ms),
            ("layer_memory_total_mb", self.execution_memory.layer_memory_total_mb),
        ):
            if len(values) != wanted:
                raise ValueError(f"'{name}' has {len(values)} values, but 'num_layers' is {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerFigures:
    """What one rank takes for one micro-batch, unit by unit."""

    seconds: FloatArray  # forward and backward of each unit
    memory_bytes: FloatArray  # of each unit, with one micro-batch on the chip
    fixed_bytes: FloatArray  # of them what stays from micro-batch to micro-batch: the states
    parameter_bytes: FloatArray  # of each unit, on this rank
    boundary_bytes: FloatArray  # what each unit hands on
    optimizer_s: float  # of the whole model
    flags: tuple[str, ...] = ()  # what of it was extrapolated

    @classmethod
    def of(cls, document: _Document) -> LayerFigures:
        """Return a file's figures in seconds and bytes."""
        parameters = np.asarray(document.model.parameters.parameters_per_layer_bytes)
        memory = MEGABYTE * np.asarray(document.execution_memory.layer_memory_total_mb)
        return cls(
            seconds=_MILLISECOND * np.asarray(document.execution_time.layer_compute_total_ms),
            memory_bytes=memory,
            fixed_bytes=np.minimum(memory, _STATE_COPIES * parameters),
            parameter_bytes=parameters,
            boundary_bytes=np.asarray(document.model.parameters.activation_parameters_bytes),
            optimizer_s=_MILLISECOND * document.execution_time.optimizer_time_ms,
        )


@dataclass(frozen=True, slots=True, eq=False)
class LayerProfiles:
    """The measurements of one model, by (chip, tp, sequences per micro-batch)."""

    folder: str
    model: str
    num_units: int
    figures: Mapping[tuple[str, int, int], LayerFigures]

    @classmethod
    def load(cls, folder: Path) -> LayerProfiles:
        """Read every `*.json` of a folder; anything wrong is one line."""
        if not folder.is_dir():
            said = "is a file" if folder.exists() else "no such folder"
            raise InputError(f"{folder}: {said}; name one of {{chip}}_tp1_bs1.json files")
        figures: dict[tuple[str, int, int], LayerFigures] = {}
        first: tuple[str, _Model] | None = None
        for path in sorted(folder.glob("*.json")):
            key = _key(path.name)
            document = build_fields(_Document, files.read_file(path), Place(path.name))
            first = first or (path.name, document.model)
            if document.model.num_layers != first[1].num_layers:
                raise InputError(
                    f"{path.name}: 'num_layers' is {document.model.num_layers}, but "
                    f"{first[1].num_layers} in {first[0]}; a folder holds one model"
                )
            figures[key] = LayerFigures.of(document)
        if first is None:
            raise InputError(f"{folder}: holds no file like A100_tp1_bs1.json")
        return cls(folder.name, first[1].model_name, first[1].num_layers, _with_states(figures))

    @property
    def chips(self) -> tuple[str, ...]:
        """The chips as the files call them."""
        return tuple(sorted({chip for chip, _, _ in self.figures}))

    def degrees(self, chip: str) -> tuple[int, ...]:
        """Return the tensor-parallel degrees that were measured on a chip."""
        self._require_chip(chip)
        return tuple(sorted({tp for name, tp, _ in self.figures if name == chip}))

    def batches(self, chip: str, tp: int) -> tuple[int, ...]:
        """Return the micro-batches that were measured, in sequences."""
        if tp not in self.degrees(chip):
            known = ", ".join(map(str, self.degrees(chip)))
            raise InputError(
                f"layer profile {self.folder}: {chip} was measured with tp {known}, not {tp}; "
                "measure it, or plan with one of these"
            )
        return tuple(sorted(b for name, t, b in self.figures if (name, t) == (chip, tp)))

    def _require_chip(self, chip: str) -> None:
        if chip not in self.chips:
            raise InputError(f"layer profile {self.folder}: no chip '{chip}'; "
                             f"{hint(chip, self.chips)}")  # fmt: skip

    def name_of(self, chip: Chip) -> str | None:
        """Return what the files call a chip, None if they do not cover it.

        That is its name, else an alias, else the longest beginning: "A100" of "A100-40".
        """
        own = {name.casefold() for name in (chip.name, *chip.aliases)}
        for name in self.chips:
            if name.casefold() == chip.name.casefold():
                return name
        for name in self.chips:
            if name.casefold() in own:
                return name
        starts = [n for n in self.chips if re.match(rf"{re.escape(n)}\b", chip.name, re.IGNORECASE)]
        return max(starts, key=len, default=None)

    def note(self, chip: Chip) -> str:
        """Say which measurements stand for a chip: "A100 for A100-40, tp 1 2 4, batches 1 to 8"."""
        name = self.name_of(chip)
        if name is None:
            return f"{chip.name} not measured"
        degrees = self.degrees(name)
        batches = [b for tp in degrees for b in self.batches(name, tp)]
        stands = name if name == chip.name else f"{name} for {chip.name}"
        reach = f"{min(batches)} to {max(batches)}" if min(batches) < max(batches) else batches[0]
        return f"{stands}, tp {' '.join(map(str, degrees))}, batches {reach}"

    def at(self, chip: str, tp: int, batch: float, *, extrapolate: bool = False) -> LayerFigures:
        """Return the figures of a micro-batch; between measured ones along the straight line.

        Outside them it is refused, or with `extrapolate` the nearest line goes on, and says so.
        """
        batches = self.batches(chip, tp)
        if batch in batches:
            return self.figures[chip, tp, int(batch)]
        inside = batches[0] < batch < batches[-1]
        span = f"{batches[0]} to {batches[-1]}" if len(batches) > 1 else f"{batches[0]} only"
        said = f"{chip}, tp {tp}: {batch:g} sequences per micro-batch outside the measured {span}"
        if not inside and not extrapolate:
            raise InputError(
                f"layer profile {self.folder}: {said}; measure it, choose a micro-batch inside, "
                "or say --extrapolate"
            )
        flags = () if inside else (f"layer profile {said}",)
        if len(batches) == 1:
            return _scaled(self.figures[chip, tp, batches[0]], batch / batches[0], flags)
        right = int(np.clip(np.searchsorted(batches, batch), 1, len(batches) - 1))
        low, high = batches[right - 1], batches[right]
        ends = self.figures[chip, tp, low], self.figures[chip, tp, high]
        return _between(*ends, (batch - low) / (high - low), flags)


def _key(name: str) -> tuple[str, int, int]:
    matched = _NAME.fullmatch(name)
    if matched is None:
        raise InputError(f"{name}: is not named like A100_tp1_bs1.json ({{chip}}_tp{{t}}_bs{{b}})")
    return matched["chip"], int(matched["tp"]), int(matched["batch"])


def _with_states(
    figures: Mapping[tuple[str, int, int], LayerFigures],
) -> dict[tuple[str, int, int], LayerFigures]:
    """Tell what stays from what every sequence adds, by the line through all micro-batches."""
    series: dict[tuple[str, int], list[int]] = {}
    for chip, tp, batch in figures:
        series.setdefault((chip, tp), []).append(batch)
    result = dict(figures)
    for (chip, tp), batches in series.items():
        if len(batches) < 2:
            continue
        memory = np.stack([figures[chip, tp, b].memory_bytes for b in batches])
        _, at_zero = np.polyfit(np.asarray(batches, dtype=np.float64), memory, 1)
        fixed = np.clip(at_zero, 0.0, memory.min(axis=0))
        for batch in batches:
            result[chip, tp, batch] = _replaced(figures[chip, tp, batch], fixed_bytes=fixed)
    return result


def _replaced(figures: LayerFigures, **changes: FloatArray) -> LayerFigures:
    values = {name: getattr(figures, name) for name in LayerFigures.__slots__}
    return LayerFigures(**(values | changes))


def _scaled(one: LayerFigures, factor: float, flags: tuple[str, ...]) -> LayerFigures:
    """Return figures of another micro-batch where one alone is known: in proportion."""
    moving = one.memory_bytes - one.fixed_bytes
    return LayerFigures(
        seconds=one.seconds * factor,
        memory_bytes=one.fixed_bytes + moving * factor,
        fixed_bytes=one.fixed_bytes,
        parameter_bytes=one.parameter_bytes,
        boundary_bytes=one.boundary_bytes * factor,
        optimizer_s=one.optimizer_s,
        flags=flags,
    )


def _between(
    low: LayerFigures, high: LayerFigures, share: float, flags: tuple[str, ...]
) -> LayerFigures:
    def line(a: FloatArray, b: FloatArray) -> FloatArray:
        values: FloatArray = np.maximum(0.0, a + share * (b - a))
        return values

    memory = line(low.memory_bytes, high.memory_bytes)
    return LayerFigures(
        seconds=line(low.seconds, high.seconds),
        memory_bytes=memory,
        fixed_bytes=np.minimum(low.fixed_bytes, memory),
        parameter_bytes=low.parameter_bytes,
        boundary_bytes=line(low.boundary_bytes, high.boundary_bytes),
        optimizer_s=max(0.0, low.optimizer_s + share * (high.optimizer_s - low.optimizer_s)),
        flags=flags,
    )
