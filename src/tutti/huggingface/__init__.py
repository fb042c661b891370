"""Hugging Face in and out: weight maps, conversion, and proof that nothing changed.

`open_checkpoint` reads a Hugging Face or a tutti folder by our names, whole or in slices;
`convert` streams one into the other; `dumps` and `comparison` compare two runs of a model. It
imports neither `nn` nor `train`, and torch only where a tensor is asked for.
"""

from tutti.huggingface.checkpoint import Checkpoint, TensorInfo
from tutti.huggingface.folders import open_checkpoint

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]
