"""Training data: sources, tokens, rows, their order, and the thread that brings them.

`open_data` makes rows of a `DataConfig`; `Feeder` (in `feeder`, which needs torch) brings them to a
rank's device. Everything else is numpy alone.
"""

from tutti.train.data.config import DataConfig, PackingConfig, SourceConfig
from tutti.train.data.open_data import DataState, PackedData, open_data
from tutti.train.data.row import NO_TARGET, Row

__all__ = [
    "NO_TARGET",
    "DataConfig",
    "DataState",
    "PackedData",
    "PackingConfig",
    "Row",
    "SourceConfig",
    "open_data",
]
