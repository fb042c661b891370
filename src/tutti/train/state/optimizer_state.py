"""What the optimizer keeps of the elements that are this rank's: on the device or on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from tutti.accelerator.accelerator import Event
from tutti.accelerator.reference.moment_codes import decode, encode
from tutti.plan.job import CODE_BLOCK
from tutti.train.state.host_vectors import HostCopy


@dataclass(slots=True)
class OptimizerState:
    """Master weights and moments; those with a home on the host are at home between steps."""

    master: Tensor | None  # the weights in the master dtype; None: the parameters themselves
    mean: Tensor | None
    square: Tensor | None
    homes: Mapping[str, HostCopy] = field(default_factory=dict)
    mean_scales: Tensor | None = None  # where moments are codes of 8 bits
    square_scales: Tensor | None = None
    average: Tensor | None = None  # the running mean of the weights
    _opened: dict[str, Tensor] = field(default_factory=dict)  # to be written by somebody

    def tensors(self) -> dict[str, Tensor]:
        """Return what there is, by name, to be read and written between steps."""
        self.settle()
        names = ("master", "mean", "square", "mean_scales", "square_scales", "average")
        named = {name: getattr(self, name) for name in names}
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

    # --- moments in 8 bits ---------------------------------------------------------------------

    @property
    def is_coded(self) -> bool:
        """Whether moments are codes."""
        return self.mean_scales is not None

    def numbers(self, name: str, *, writable: bool = False) -> Tensor | None:
        """Return a moment between steps as numbers: the vector itself, or what its codes stand for.

        Numbers of codes lie on the host; what is written to `writable` ones is encoded by `close`.
        """
        codes: Tensor | None = getattr(self, name)
        if codes is None or not self.is_coded:
            return codes
        if name in self._opened:
            return self._opened[name]
        numbers = self.decoded(name).to("cpu")
        if writable:
            self._opened[name] = numbers
        return numbers

    def close(self) -> None:
        """Encode what was opened to be written."""
        for name, values in self._opened.items():
            codes: Tensor = getattr(self, name)
            self.encode(name, values.to(codes.device))
        self._opened.clear()

    def decoded(self, name: str) -> Tensor:
        """Return a moment's numbers, where its codes are now."""
        return decode(name, getattr(self, name), getattr(self, f"{name}_scales"), CODE_BLOCK)

    def encode(self, name: str, values: Tensor) -> None:
        """Keep a moment's numbers as codes."""
        codes, scales = getattr(self, name), getattr(self, f"{name}_scales")
        encode(name, values, codes, scales, CODE_BLOCK)
