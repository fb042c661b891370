"""What this machine has: kinds of devices, and per operator what can run it and what will."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tutti.accelerator.accelerator import Accelerator
from tutti.accelerator.find import count, kinds, open_accelerator
from tutti.accelerator.registry import operator_names, registered
from tutti.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorEntry:
    """What runs an operator on a device."""

    operator: str
    implementations: tuple[str, ...]  # that are here, the preferred by rank first
    chosen: str
    why: str  # measured, ranked, forced, the only one
    missing: tuple[str, ...]  # "name (needs package)"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindEntry:
    """A kind of device and, where one is here, its operators."""

    kind: str
    count: int
    chip: str = ""
    device_type: str = ""
    collective_backend: str = ""
    measured: str = ""  # where the choices come from
    problem: str = ""  # why a device that is here cannot be opened
    operators: tuple[OperatorEntry, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def inventory() -> Iterator[KindEntry]:
    """Yield every kind, those asked first in front."""
    for kind in kinds():
        try:
            present = count(kind)
        except InputError as error:  # a broken plug-in; the others still count
            yield KindEntry(kind=kind, count=0, problem=str(error))
            continue
        if not present:
            yield KindEntry(kind=kind, count=0)
            continue
        accelerator = open_accelerator(kind)
        yield KindEntry(
            kind=kind,
            count=present,
            chip=accelerator.chip,
            device_type=accelerator.device.type,
            collective_backend=accelerator.collective_backend,
            measured=accelerator.operators.choices.origin,
            operators=tuple(_entry(accelerator, operator) for operator in operator_names()),
        )


def _entry(accelerator: Accelerator, operator: str) -> OperatorEntry:
    known = registered(operator, accelerator.device.type)
    chosen, why = accelerator.operators.preferred(operator)
    return OperatorEntry(
        operator=operator,
        implementations=tuple(i.name for i in known if i.present),
        chosen=chosen,
        why=why,
        missing=tuple(f"{i.name} (needs {i.needs})" for i in known if not i.present),
    )
