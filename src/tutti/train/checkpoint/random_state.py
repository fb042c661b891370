"""A chip's random generator in a checkpoint."""

from __future__ import annotations

import torch

from tutti.accelerator.accelerator import Accelerator
from tutti.train.checkpoint.manifest import RandomState


def random_state(accelerator: Accelerator) -> RandomState:
    """Return the state of the generator as plain values."""
    state = accelerator.random_state()
    return RandomState(device=accelerator.device.type, state=bytes(state.tolist()).hex())


def restore_random_state(accelerator: Accelerator, saved: RandomState) -> bool:
    """Set the generator; False where the state is of another kind of chip and means nothing."""
    if saved.device != accelerator.device.type:
        return False
    state = torch.tensor(list(bytes.fromhex(saved.state)), dtype=torch.uint8)
    accelerator.restore_random_state(state)
    return True
