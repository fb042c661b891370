"""A model with its adapters added to its weights: what `transformers` loads without PEFT."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tutti.huggingface.checkpoint import Checkpoint, StoredFile
from tutti.huggingface.dtypes import Dtype
from tutti.huggingface.pieces import Bounds, whole
from tutti.huggingface.tensor_file import Raw
from tutti.huggingface.tensors import to_raw, to_torch
from tutti.models import ModelSpec
from tutti.models.tuning import DOWN, MAGNITUDE, UP, is_adapter


class MergedModel(Checkpoint):
    """The weights of a base, each with what was trained of it, slice by slice."""

    def __init__(self, base: Checkpoint, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
        """Take a base and what was trained of the tuned `spec`, by our names."""
        assert spec.tuning is not None
        super().__init__(base.folder, spec.untuned)
        self._base = base
        self._trained = {name: value for name, value in tensors.items() if not is_adapter(name)}
        self._factors: dict[str, tuple[Tensor, Tensor]] = {}
        self._magnitudes: dict[str, Tensor] = {}
        adapter = spec.tuning.adapter
        for name, value in tensors.items() if adapter is not None else ():
            layer, _, side = name.rpartition(".")
            if side == UP:
                down = tensors[self._holder(layer, tensors, spec)]
                scale = adapter.scale if adapter is not None else 1.0
                self._factors[f"{layer}.weight"] = (down.float(), value.float() * scale)
            elif side == MAGNITUDE:
                self._magnitudes[f"{layer}.weight"] = value.float()

    @staticmethod
    def _holder(layer: str, tensors: Mapping[str, Tensor], spec: ModelSpec) -> str:
        """Return the name of a layer's down factor, which may be a sibling's."""
        own = f"{layer}.{DOWN}"
        if own in tensors:
            return own
        assert spec.tuning is not None
        assert spec.tuning.adapter is not None
        unit, _, bare = layer.partition(".")
        group = next(group for group in spec.tuning.adapter.joined if bare in group)
        return next(n for m in group if (n := f"{unit}.{m}.{DOWN}") in tensors)

    def dtype(self, name: str) -> Dtype:
        """Return the number format of a tensor: the base's."""
        return self._base.dtype(name)

    def raw(self, name: str, bounds: Bounds) -> Raw:
        """Return the bytes of a slice, with what was trained."""
        owner, cut = self.owner(name), tuple(slice(*interval) for interval in bounds)
        if owner in self._trained:
            return to_raw(self._rounded(self._trained[owner][cut], name), self.dtype(name))
        if name not in self._factors:
            return self._base.raw(name, bounds)
        rows = (*bounds[:-1], *whole(self.parameter(name).shape[-1:]))  # lengths are of whole rows
        wide = to_torch(self._base.raw(name, rows), self.dtype(name)).float()
        down, up = self._factors[name]
        if down.dim() == 3:
            wide += up[cut[0], cut[1]] @ down[cut[0]]
        else:
            wide += up[cut[0]] @ down
        if name in self._magnitudes:
            wide *= (self._magnitudes[name][cut[0]] / wide.norm(dim=1)).unsqueeze(1)
        return to_raw(self._rounded(wide[..., cut[-1]], name), self.dtype(name))

    def _rounded(self, wide: Tensor, name: str) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.dtype(name).name)
        return wide.to(dtype).contiguous()

    def drop(self) -> None:
        """Give back the memory of the base's files."""
        self._base.drop()

    @property
    def stored(self) -> Mapping[str, StoredFile]:
        """The files that the base came in: the merged one has the same."""
        return self._base.stored

    @property
    def carried(self) -> Mapping[str, Dtype]:
        """Stored tensors that the model does not need."""
        return self._base.carried

    def carried_raw(self, key: str) -> Raw:
        """Return the bytes of a carried tensor."""
        return self._base.carried_raw(key)

    def plain_files(self) -> tuple[str, ...]:
        """Return the files beside the weights: config, tokenizer."""
        return self._base.plain_files()

    def identity(self) -> object:
        """Return what tells this model from another."""
        sums = {name: float(value.double().sum()) for name, value in self._trained.items()}
        sums |= {name: float(up.double().sum()) for name, (_, up) in self._factors.items()}
        return {"base": self._base.identity(), "adapters": sums}
