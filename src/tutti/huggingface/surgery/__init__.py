"""A model made of others, without training: averaged, with more tokens, with longer context."""

from tutti.huggingface.surgery.average import average
from tutti.huggingface.surgery.grow import grow
from tutti.huggingface.surgery.stretch import stretch

__all__ = ["average", "grow", "stretch"]
