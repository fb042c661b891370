"""Which tensors, or parts of them, stand together in which file of a tutti folder.

Without a plan each unit has a file, and any rank of any plan reads its slices out of it. With a
plan the files follow its cuts, so that a rank reads whole files from front to back: units that the
same stages hold stand together; what tensor parallelism cuts is cut into as many slices as all
holders' degrees need; experts are cut where some holder's expert groups cut them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tutti.errors import InputError
from tutti.models import ModelSpec, Parameter
from tutti.plan.plan import ExpertGroup, Plan, Stage

MOST_FILE_BYTES = 8 << 30  # one tensor may be larger


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A tensor, or the range start…stop of one of its dimensions, in a file."""

    name: str
    shape: tuple[int, ...]  # of what is stored here
    num_bytes: int
    dim: int = 0
    start: int = 0
    stop: int = 0
    part: bool = False  # not the whole tensor


Layout = Mapping[str, tuple[Placed, ...]]  # by file name


def unit_layout(spec: ModelSpec, item_bytes: Mapping[str, int]) -> Layout:
    """Return a file for each unit; `item_bytes` is the width of each stored tensor's numbers."""
    digits = len(str(spec.head_unit))
    files: dict[str, tuple[Placed, ...]] = {}
    for unit in range(spec.num_units):
        placed = [
            _whole(f"{unit}.{parameter.name}", parameter, item_bytes)
            for parameter in spec.parameters(unit)
            if parameter.tied_to is None
        ]
        files.update(_split(f"unit-{unit:0{digits}}", placed))
    return files


def plan_layout(spec: ModelSpec, plan: Plan, item_bytes: Mapping[str, int]) -> Layout:
    """Return files that follow a plan's stages, tensor slices and expert groups."""
    _check_model(spec, plan)
    digits = len(str(spec.head_unit))
    files: dict[str, tuple[Placed, ...]] = {}
    for first, last, holders in _segments(spec, plan):
        stem = f"units-{first:0{digits}}-{last:0{digits}}"
        slices = math.lcm(*(replica.tp for stage in holders for replica in stage.replicas))
        placed: dict[str, list[Placed]] = {stem: []}
        for unit in range(first, last + 1):
            for parameter in spec.parameters(unit):
                if parameter.tied_to is None:
                    name = f"{unit}.{parameter.name}"
                    for file, item in _cut(name, parameter, holders, slices, item_bytes):
                        placed.setdefault(stem + file, []).append(item)
        for file, items in sorted(placed.items()):
            files.update(_split(file, items))
    return files


def _check_model(spec: ModelSpec, plan: Plan) -> None:
    planned = plan.model.spec
    hash_ = planned.with_prediction_heads(0).fingerprint if planned else plan.model.hash
    if hash_ and hash_ != spec.fingerprint:
        raise InputError(
            f"--plan: the plan is for '{plan.model.name}' with the hash {hash_}; the checkpoint "
            f"'{spec.name}' has {spec.fingerprint}"
        )


def _segments(spec: ModelSpec, plan: Plan) -> Iterator[tuple[int, int, list[Stage]]]:
    """Yield runs of units that the same stages hold: first, last, stages."""

    def places(unit: int) -> tuple[tuple[int, int], ...]:
        return tuple((p, s) for p, s, _ in plan.holders(unit))

    for _, run in itertools.groupby(range(spec.num_units), key=places):
        units = list(run)
        yield units[0], units[-1], [stage for _, _, stage in plan.holders(units[0])]


def _cut(
    name: str,
    parameter: Parameter,
    holders: Sequence[Stage],
    slices: int,
    item_bytes: Mapping[str, int],
) -> Iterator[tuple[str, Placed]]:
    """Yield the parts of a tensor with the ending of their file's name."""
    whole = _whole(name, parameter, item_bytes)
    groups = [group for stage in holders for group in stage.experts]
    if parameter.experts and groups:
        bounds = _expert_bounds(parameter.experts, groups)
        for start, stop in itertools.pairwise(bounds):
            yield f"-experts-{start}-{stop - 1}", _part(whole, parameter, 0, start, stop)
        return
    # What does not divide into all slices is cut less finely, at worst not at all.
    count = math.gcd(parameter.slice_parts, slices) if parameter.slice_dim is not None else 1
    if count == 1:
        yield "", whole
        return
    dim = parameter.slice_dim
    assert dim is not None
    size = parameter.shape[dim] // count
    for index in range(count):
        first = index * (slices // count)
        part = _part(whole, parameter, dim, index * size, (index + 1) * size)
        yield f"-slice-{first}-of-{slices}", part


def _expert_bounds(experts: int, groups: Sequence[ExpertGroup]) -> list[int]:
    bounds = {0, experts}
    for group in groups:
        even = [experts * chip // group.chips for chip in range(group.chips + 1)]
        bounds |= set(itertools.accumulate(group.experts)) if group.experts else set(even)
    return sorted(bounds)


def _whole(name: str, parameter: Parameter, item_bytes: Mapping[str, int]) -> Placed:
    shape = parameter.shape
    return Placed(name=name, shape=shape, num_bytes=math.prod(shape) * item_bytes[name])


def _part(whole: Placed, parameter: Parameter, dim: int, start: int, stop: int) -> Placed:
    shape = (*parameter.shape[:dim], stop - start, *parameter.shape[dim + 1 :])
    num_bytes = whole.num_bytes // parameter.shape[dim] * (stop - start)
    return Placed(
        name=whole.name,
        shape=shape,
        num_bytes=num_bytes,
        dim=dim,
        start=start,
        stop=stop,
        part=True,
    )


def _split(stem: str, placed: Sequence[Placed]) -> Iterator[tuple[str, tuple[Placed, ...]]]:
    """Yield files of at most `MOST_FILE_BYTES`, or of one tensor."""
    runs: list[list[Placed]] = []
    size = 0
    for item in placed:
        if not runs or size + item.num_bytes > MOST_FILE_BYTES:
            runs.append([])
            size = 0
        runs[-1].append(item)
        size += item.num_bytes
    for number, run in enumerate(runs):
        ending = f"-{number + 1}" if len(runs) > 1 else ""
        yield f"{stem}{ending}.safetensors", tuple(run)
