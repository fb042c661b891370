"""What would happen when: a Schedule's lists, executed against given seconds and bytes.

`inputs` says what is given, `run` executes, `result` answers. The semantics in `run` are the
contract with the engine, which executes the same lists on tensors. Nothing here knows where the
numbers come from; `cost` makes them.
"""

from tutti.simulate.inputs import ClassCosts, StepCosts
from tutti.simulate.labels import ClassLabel, labels_of
from tutti.simulate.perturb import Spread, perturb, repeat
from tutti.simulate.result import SimulationResult
from tutti.simulate.run import simulate

__all__ = [
    "ClassCosts",
    "ClassLabel",
    "SimulationResult",
    "Spread",
    "StepCosts",
    "labels_of",
    "perturb",
    "repeat",
    "simulate",
]
