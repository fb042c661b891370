"""Serving's pure state: requests, pages of keys and values, the prefix tree, the next step.

`Scheduler` is a state machine: events in (a request arrived or was cancelled, a step's tokens came,
there is room for a step), one `Step` out. It knows no tensors, no clock and no device: the engine
runs it on a chip, the simulator against prices.
"""

from tutti.batching.events import Arrived, Cancelled, Guessed, Received, Room, Tokens
from tutti.batching.pages import PagePool
from tutti.batching.prefix import PrefixTree
from tutti.batching.prices import LinearPrices, Prices, StepSize, TabledPrices
from tutti.batching.request import Finish, Request, Sequence
from tutti.batching.scheduler import Scheduler
from tutti.batching.settings import Settings
from tutti.batching.step import Step

__all__ = [
    "Arrived",
    "Cancelled",
    "Finish",
    "Guessed",
    "LinearPrices",
    "PagePool",
    "PrefixTree",
    "Prices",
    "Received",
    "Request",
    "Room",
    "Scheduler",
    "Sequence",
    "Settings",
    "Step",
    "StepSize",
    "TabledPrices",
    "Tokens",
]
