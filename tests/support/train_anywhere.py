"""Trains small models on a device named on the command line; prints each one's losses as JSON.

It names no device, as nothing above the accelerator layer does.
"""

from __future__ import annotations

import json
import sys

import torch

from tests.support.models import LENGTHS, batch_of, fill, spec_of, total_loss
from tutti.accelerator import Accelerator, open_accelerator
from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.nn import Batch, Model

STEPS = 3
SETTINGS = AdamSettings(learning_rate=1e-2, weight_decay=0.1)


def losses(accelerator: Accelerator, kind: str, dtype: torch.dtype = torch.float32) -> list[float]:
    """Return the losses of a few steps of AdamW with clipping."""
    spec = spec_of(kind)
    operators = accelerator.operators
    model = fill(Model(spec, operators, dtype=dtype, device=accelerator.device))
    host = batch_of(spec)
    assert host.targets_t is not None
    batch = Batch.of(
        spec,
        accelerator.to_device(host.tokens_t),
        LENGTHS,
        targets_t=accelerator.to_device(host.targets_t),
    )
    weights = [p for p in model.parameters() if p.requires_grad]
    means, squares = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    found = []
    for step in range(1, STEPS + 1):
        loss = total_loss(model(None, batch)) / sum(LENGTHS)
        loss.backward()
        used = [i for i, w in enumerate(weights) if w.grad is not None]
        gradients = [weights[i].grad for i in used]
        norm = operators.squared_norm(gradients).sqrt()
        operators.adamw(
            [weights[i] for i in used],
            gradients,
            [means[i] for i in used],
            [squares[i] for i in used],
            step=step,
            settings=SETTINGS,
            gradient_factor=torch.clamp(1.0 / norm, max=1.0),
        )
        for weight in weights:
            weight.grad = None
        found.append(float(loss.detach()))
    return found


if __name__ == "__main__":
    device, *kinds = sys.argv[1:]
    opened = open_accelerator(device)
    result = {kind: losses(opened, kind) for kind in kinds}
    print(json.dumps({"device": str(opened.device), "losses": result}))
