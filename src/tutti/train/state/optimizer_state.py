"""What the optimizer keeps of the elements that are this rank's: on the device or on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from tutti.accelerator.accelerator import Event
from tutti.train.state.host_vectors import HostCopy


@dataclass(slots=True)
class OptimizerState:
    """Master weights and moments; those with a home on the host are at home between steps."""

    master: Tensor | None  # the weights in the master dtype; None: the parameters themselves
    mean: Tensor | None
    square: Tensor | None
    homes: Mapping[str, HostCopy] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Return what there is, by name, to be read and written between steps."""
        self.settle()
        named = {"master": self.master, "mean": self.mean, "square": self.square}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def fetch(self) -> None:
        """Bring to the device what lives on the host."""
        for home in self.homes.values():
            home.fetch()

    def arrive(self) -> None:
        """Use what was brought."""
        for name, home in self.homes.items():
            setattr(self, name, home.arrive())

    def store(self) -> list[Event | None]:
        """Bring it home, as it is now."""
        events = [home.store() for home in self.homes.values()]
        for name, home in self.homes.items():
            setattr(self, name, home.at_rest)
        return events

    def settle(self) -> None:
        """Wait until the host may read what lives there."""
        for home in self.homes.values():
            home.settle()
