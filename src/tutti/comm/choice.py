"""Which program runs: what the cost model chooses from the Profile, unless somebody overrides it.

`TUTTI_COMM="all_reduce=hierarchical:chunks=4;all_to_all=rail"` overrides by operation; all ranks
must be started with the same. The choice itself is `cost.programs.choose_program`'s.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tutti.collective import CollectiveProgram, Group, Operation, algorithms, build
from tutti.collective.builder import unmet_need
from tutti.cost.network.group_links import GroupLinks
from tutti.cost.network.program_choice import Choice, Efficiency, choose_program
from tutti.cost.network.tuned_programs import Tuned
from tutti.errors import InputError, hint
from tutti.plan.collectives import ALGORITHMS

VARIABLE = "TUTTI_COMM"
_OPTIONS = ("chunks", "connections", "across")
_MEASURED = Efficiency(island=1.0, fabric=1.0, startup_s=0.0, hop_s=0.0)  # links are as they are
_KEEPS_BITS = frozenset({"hierarchical", "proportional", "leader", "rail"})


Chosen = Literal["override", "caller", "plan", "cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A program by name."""

    algorithm: str
    chunks: int = 1
    connections: int = 1
    across: str | None = None
    by: Chosen = field(default="cost", compare=False)  # who says so

    def build(
        self, operation: Operation, group: Group, root: int | None = None
    ) -> CollectiveProgram:
        """Return the program."""
        return build(
            operation,
            self.algorithm,
            group,
            root=root,
            across=self.across,
            chunks=self.chunks,
            connections=self.connections,
        )


def parse_overrides(text: str) -> dict[str, Named]:
    """Read "operation=algorithm:chunks=4:connections=2;…"."""
    overrides: dict[str, Named] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        operation, _, rest = entry.partition("=")
        if operation not in ALGORITHMS:
            raise InputError(f"{VARIABLE}: '{entry}': {hint(operation, ALGORITHMS)}")
        algorithm, *options = rest.split(":")
        if algorithm not in ALGORITHMS[operation]:
            known = hint(algorithm, ALGORITHMS[operation])
            raise InputError(f"{VARIABLE}: no algorithm '{algorithm}' for {operation}; {known}")
        named = Named(algorithm=algorithm, by="override")
        for option in options:
            named = _with_option(named, option)
        overrides[operation] = named
    return overrides


def _with_option(named: Named, option: str) -> Named:
    name, _, value = option.partition("=")
    if name not in _OPTIONS:
        raise InputError(f"{VARIABLE}: option '{option}'; {hint(name, _OPTIONS)}")
    if name == "across":
        return dataclasses.replace(named, across=value)
    if not value.isdigit() or not int(value):
        raise InputError(f"{VARIABLE}: '{option}' needs a whole number of at least 1")
    number = int(value)
    if name == "chunks":
        return dataclasses.replace(named, chunks=number)
    return dataclasses.replace(named, connections=number)


Rule = Callable[[Operation, int], Named | None]  # operation, bytes → the program that shall run


class Chooser:
    """Chooses the program of every call on one group."""

    def __init__(
        self,
        links: GroupLinks,
        tuned: Tuned | None = None,
        *,
        connections: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.links = links
        self._tuned = tuned or None
        self.connections = connections
        text = (os.environ if environment is None else environment).get(VARIABLE, "")
        self._overrides = parse_overrides(text)
        self._obeyed: dict[str, Named] = {}
        self._rule: Rule = lambda _operation, _num_bytes: None
        self._known: dict[tuple[Operation, int, bool], Named] = {}

    def use(self, links: GroupLinks) -> None:
        """Choose by other links from now on; on all ranks alike."""
        self.links = links
        self._known.clear()

    def obey(self, operation: Operation | str, named: Named | None) -> None:
        """Run this program from now on; None: choose again."""
        self._obeyed.pop(Operation(operation).value, None)
        if named is not None:
            self._obeyed[Operation(operation).value] = dataclasses.replace(named, by="caller")
        self._known.clear()

    def follow(self, rule: Rule) -> None:
        """Run what a rule names from now on, as a Plan says by size; None: choose."""
        self._rule = rule
        self._known.clear()

    def choose(self, operation: Operation, num_bytes: int, *, lossy: bool = False) -> Named:
        """Return the program for so many bytes of all sections together.

        `lossy`: messages between islands will be rounded; only programs that leave the same bits
        on all ranks then will do.
        """
        key = (operation, num_bytes, lossy)
        if key not in self._known:
            self._known[key] = self._choose(operation, num_bytes, lossy)
        return self._known[key]

    def _choose(self, operation: Operation, num_bytes: int, lossy: bool) -> Named:
        group = self.links.group
        possible = algorithms(operation, group)
        name = operation.value
        ruled = self._rule(operation, num_bytes)
        override = self._overrides.get(name)
        if override is not None and override.algorithm in possible:
            return override  # said for an operation, not for a group: holds wherever it can
        if (wanted := self._obeyed.get(name) or ruled) is not None:
            if missing := unmet_need(wanted.algorithm, group):
                raise InputError(
                    f"{operation}: '{wanted.algorithm}' {missing}; the group of ranks "
                    f"{', '.join(map(str, group.ranks[:16]))} has {len(group.islands)}"
                )
            return wanted
        if operation is Operation.BARRIER or group.size == 1 or not num_bytes:
            return Named(algorithm=possible[0])
        choice = self.priced(operation, num_bytes)
        best = [(choice.algorithm, choice.chunks), *((a, c) for a, c, _ in choice.alternatives)]
        for algorithm, chunks in best:
            if not lossy or keeps_bits(operation, algorithm, group):
                return Named(algorithm=algorithm, chunks=chunks, connections=self.connections)
        raise InputError(f"{operation}: no program can be compressed on this group")

    def priced(self, operation: Operation, num_bytes: int) -> Choice:
        """Return what the cost model chooses, and over what."""
        return choose_program(operation, float(num_bytes), self.links, _MEASURED, tuned=self._tuned)


def keeps_bits(operation: Operation, algorithm: str, group: Group) -> bool:
    """Tell whether rounding between islands leaves the same bits on all ranks.

    So it does where the exchange between islands comes before the last step inside them, where
    every rank is an island of its own, and where nobody else gets the same data.
    """
    single = group.size == len(group.islands)
    alone = operation in (Operation.ALL_TO_ALL, Operation.SEND_RECEIVE)
    return single or alone or algorithm in _KEEPS_BITS
