"""Weights of 8 and 4 bits: what they stand for, how they are made, and the host's products."""

from tutti.accelerator.quantised.quantise import KINDS, frozen, quantise
from tutti.accelerator.quantised.weight import QuantisedWeight, joined, stacked

__all__ = ["KINDS", "QuantisedWeight", "frozen", "joined", "quantise", "stacked"]
