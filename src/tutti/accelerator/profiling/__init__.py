"""Measures a chip: operators over shapes, memory, host copies and links, into a `Profile`."""

from tutti.accelerator.profiling.session import Session, measure_profile

__all__ = ["Session", "measure_profile"]
