"""Seconds and bytes of every instruction of a Plan's Schedule: what the simulator is given.

Each pool is priced with its own calibration (chip and software stack); a chip without one is
priced from the catalog's nominal figures and the constants' priors, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tutti.cost.arrays import Machine, Shape, Strategy
from tutti.cost.boundaries import boundary_seconds
from tutti.cost.calibration.shipped import Calibration, load_calibration
from tutti.cost.constants import Constants
from tutti.cost.holdings import Holdings, Kernels
from tutti.cost.inputs import ClassCosts, StepCosts
from tutti.cost.memory import MemoryModel, Overheads
from tutti.cost.programs import Efficiency
from tutti.cost.synchronise import Groups, collective_choice
from tutti.cost.units import UnitSeconds, block_seconds, embedding_seconds, head_seconds
from tutti.hardware.cluster import Cluster, Pool
from tutti.models.memory import Recompute
from tutti.models.parameters import ParameterClass
from tutti.models.spec import ModelSpec
from tutti.plan.plan import Plan, Replica
from tutti.schedule.boundary import must_join
from tutti.schedule.instruction import Instruction, Op, What
from tutti.schedule.schedule import RankClass, Schedule, stage_of
