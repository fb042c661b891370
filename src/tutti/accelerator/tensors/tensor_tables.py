"""Where the tensors of a call lie, as tables on the device that one kernel reads for all of them.

Optimizers and norms go over hundreds of tensors at once. What a program of such a kernel needs to
know of them costs the host microseconds for each tensor, and is the same from step to step where
memory is used again: so tables are kept under the addresses that they hold. An address may belong
to another tensor by then, so layouts are compared as well, unless the tensor is the very same.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Size, Tensor

from tutti.accelerator.host_to_device import moved
from tutti.accelerator.tensors.memory_runs import Runs, common_runs

EVEN = 16  # elements; addresses, runs and steps of such multiples are read in wide words
MOST_KEPT = 1024  # tables; a step of many buckets needs two for each

Layout = tuple[Size, tuple[int, ...], torch.dtype]


class Alike(NamedTuple):
    """Tensors that go through one kernel: of the same dtypes, all of them even or not."""

    dtypes: tuple[torch.dtype, ...]
    is_even: bool


class Table(NamedTuple):
    """Tensors that lie alike: a row for each group of them, and the parts that programs take."""

    alike: Alike
    rows: Tensor  # addresses, the runs' length, the steps from run to run
    parts: Tensor  # which row, which run of it, from which part on


class _Kept(NamedTuple):
    """Tables, and the tensors that they are of."""

    tensors: list[weakref.ref[Tensor]]
    layouts: list[Layout]
    tables: tuple[Table, ...] | None

    def are_of(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether tensors at these addresses lie as those did."""
        return all(
            ref() is tensor or _layout(tensor) == layout
            for tensor, ref, layout in zip(tensors, self.tensors, self.layouts, strict=True)
        )


class TensorTables:
    """Makes and keeps the tables of one kind of kernel.

    A row has room for the addresses of `columns` tensors; a program takes `part` elements.
    """

    def __init__(self, *, columns: int, part: int) -> None:
        self._columns, self._part = columns, part
        self._kept: OrderedDict[tuple[int, ...], _Kept] = OrderedDict()

    def of(self, *lists: Sequence[Tensor]) -> tuple[Table, ...] | None:
        """Return the tables of groups of tensors, one of each list; None: they share no runs."""
        if len({len(own) for own in lists}) > 1:
            raise ValueError("lists of tensors of different lengths")
        tensors = [tensor for own in lists for tensor in own]
        places = (len(lists), *[tensor.data_ptr() for tensor in tensors])
        kept = self._kept.get(places)
        if kept is None or not kept.are_of(tensors):
            refs = [weakref.ref(tensor) for tensor in tensors]
            kept = _Kept(refs, [_layout(tensor) for tensor in tensors], self._made(lists))
            self._kept[places] = kept
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(places)
        return kept.tables

    def _made(self, lists: Sequence[Sequence[Tensor]]) -> tuple[Table, ...] | None:
        rows: dict[Alike, list[list[int]]] = {}
        shapes: dict[Alike, list[tuple[int, int]]] = {}
        unused = [0] * (self._columns - len(lists))
        for group in zip(*lists, strict=True):
            runs = common_runs(group)
            if runs is None:
                return None
            if not runs.length:
                continue
            places = [tensor.data_ptr() for tensor in group]
            alike = Alike(tuple(tensor.dtype for tensor in group), _is_even(runs, places))
            own = [*places, *unused, runs.length, *runs.steps, *unused]
            rows.setdefault(alike, []).append(own)
            shapes.setdefault(alike, []).append((runs.number, runs.length))
        if not rows:
            return ()
        device = lists[0][0].device
        return tuple(
            Table(
                alike,
                moved(torch.tensor(table, dtype=torch.int64), device),
                _parts(tuple(shapes[alike]), self._part, device),
            )
            for alike, table in rows.items()
        )


def _layout(tensor: Tensor) -> Layout:
    return tensor.shape, tensor.stride(), tensor.dtype


def _is_even(runs: Runs, places: Sequence[int]) -> bool:
    return not any(number % EVEN for number in (runs.length, *runs.steps, *places))


@functools.lru_cache(maxsize=1024)
def _parts(shapes: tuple[tuple[int, int], ...], part: int, device: torch.device) -> Tensor:
    """Return the parts that programs take: which tensor, which run of it, from where on."""
    places = []
    for index, (number, length) in enumerate(shapes):
        each = -(-length // part)
        run = torch.arange(number * each, dtype=torch.int32)
        places.append(torch.stack((torch.full_like(run, index), run // each, run % each), 1))
    return moved(torch.cat(places), device)
