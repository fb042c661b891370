"""What would happen when: a Schedule's lists, executed against given seconds and bytes.

`run` executes, `result` answers; what is given stands in `cost.inputs`. The semantics in `run` are
the contract with the engine, which executes the same lists on tensors.
"""

from tutti.cost.plan.simulator_inputs import ClassCosts, StepCosts
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
