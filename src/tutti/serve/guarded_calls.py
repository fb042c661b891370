"""Code of others on the way to a token, grammars and hooks: what fails there fails one request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tutti.plug_ins import reason
from tutti.serve.parameters import LogitsChange, SamplingParameters, TokenMask


class GuardedCalls:
    """What one sample has of it."""

    def __init__(self, own: SamplingParameters) -> None:
        """Begin with a sample that has no tokens."""
        self.failed = ""  # why it cannot go on
        self._changes: list[tuple[str, LogitsChange]] = []
        self._mask: TokenMask | None = None
        try:
            for change in own.changes:
                self._changes.append((change.name, change.new()))
        except Exception as error:  # it may fail in any way
            self._fail(own.changes[len(self._changes)].name, error)
        if own.masks is not None:
            self._mask = own.masks.new()

    def changed(self, logits_v: Tensor, tokens: Sequence[int]) -> Tensor:
        """Return a row of logits as hooks change it."""
        if not self._changes or self.failed:
            return logits_v
        own = logits_v.float().cpu().numpy().copy()
        for name, change in self._changes:
            try:
                row_v = np.asarray(change(tokens, own), np.float32)
                if row_v.shape != own.shape or np.isnan(row_v).any() or not (row_v > -np.inf).any():
                    raise ValueError(f"it returned no logits of {len(own)} tokens")
            except Exception as error:  # it may fail in any way
                self._fail(name, error)
                return logits_v
            own = row_v
        return torch.from_numpy(own).to(logits_v.device)

    def allowed(self, tokens: Sequence[int]) -> NDArray[np.bool_] | None:
        """Return which tokens may come; None: all."""
        if self._mask is None or self.failed:
            return None
        try:
            return self._mask.allowed(tokens)
        except Exception as error:  # it may fail in any way
            self.failed = f"{type(error).__name__}: {reason(error)}"
            return None

    def _fail(self, name: str, error: BaseException) -> None:
        self.failed = f"hook '{name}' failed on logits: {type(error).__name__}: {reason(error)}"
