"""`Adapters`: LoRA adapters by name, added and dropped while requests run.

Each addition has a key of its own, under which the prefix tree keeps what it computed: an adapter
that comes back under an old name finds nothing of the old one. A dropped adapter takes no new
requests; its slot is free when the last one that uses it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tutti.errors import InputError, hint
from tutti.huggingface.peft.adapter import open_adapter
from tutti.nn import Model
from tutti.nn.adapters import Slots

SLOTS, RANK = 8, 16


@dataclass(slots=True, eq=False)
class Held:
    """An adapter in its slot."""

    name: str
    key: str  # of the prefix tree
    slot: int
    users: int = 0
    dropped: bool = False


class Adapters:
    """The adapters of one worker."""

    def __init__(self, model: Model, *, slots: int = SLOTS, rank: int = RANK) -> None:
        self._spec = model.spec
        self._slots = Slots(model, slots=slots, rank=rank)
        self._free = list(range(slots - 1, -1, -1))
        self._by_name: dict[str, Held] = {}
        self._added = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Those that requests may name."""
        return tuple(self._by_name)

    @property
    def num_bytes(self) -> int:
        """What they take on the device."""
        return self._slots.num_bytes

    def add(self, name: str, folder: Path | str) -> None:
        """Read a PEFT folder into a free slot."""
        if not name:
            raise InputError("an adapter needs a name")
        if name in self._by_name:
            raise InputError(f"adapter '{name}' is there already; drop it first")
        adapter = open_adapter(folder, self._spec)
        self._slots.check(name, adapter.rank, adapter.factors)
        if not self._free:
            raise InputError(
                f"adapter '{name}': all {self._slots.slots} slots are taken; drop one, or give "
                "more adapter_slots"
            )
        slot = self._free.pop()
        self._slots.put(slot, adapter.factors)
        self._added += 1
        self._by_name[name] = Held(name, f"{name}#{self._added}", slot)

    def drop(self, name: str) -> None:
        """Take an adapter away; requests that use it go on to their end."""
        held = self._by_name.pop(self.find(name).name)
        held.dropped = True
        self._leave(held)

    def find(self, name: str) -> Held:
        """Return an adapter by its name."""
        if name not in self._by_name:
            advice = hint(name, self._by_name) if self._by_name else "the engine has none"
            raise InputError(f"no adapter '{name}'; {advice}")
        return self._by_name[name]

    def release(self, held: Held) -> None:
        """Note that a request that used an adapter has ended."""
        held.users -= 1
        self._leave(held)

    def _leave(self, held: Held) -> None:
        if held.dropped and not held.users:
            self._free.append(held.slot)

    def slots_of(self, used: Sequence[Held | None]) -> NDArray[np.int64] | None:
        """Return the slots of rows' adapters, −1: none; None where nothing is added to any."""
        slots = [-1 if held is None else held.slot for held in used]
        if not self.rooms or all(slot < 0 for slot in slots):
            return None
        return np.array(slots, np.int64)

    def use(self, rows_t: Tensor | None, order_t: Tensor | None = None) -> None:
        """Tell the model the slot of each token's adapter; None: no token has one.

        `order_t`: the tokens, those of one slot together.
        """
        self._slots.rows_t, self._slots.order_t = rows_t, order_t

    @property
    def rooms(self) -> int:
        """How many layers have room for adapters: it grows with what some adapter adds to."""
        return self._slots.rooms

    @property
    def capturable(self) -> bool:
        """Whether a graph can hold what they add: the operator does not ask the host."""
        return not self._slots.asks_host
