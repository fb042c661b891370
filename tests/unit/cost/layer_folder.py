"""Folders of per-layer profiles for tests: made up for OPT-350M, and the published ones."""

from __future__ import annotations

import json
from pathlib import Path

from tutti.models.load import load_model
from tutti.models.memory import local_parameters

PUBLISHED = Path(__file__).parents[4] / "shared/data/layer_profiles/opt350"
MODEL = load_model("opt-350m")
UNITS = MODEL.head_unit + 1
LENGTH = 2048


def document(tp: int = 1, batch: int = 1, speed: float = 1.0, units: int = UNITS) -> dict:
    """A profile whose block takes (1 + 2·batch)/(tp·speed) ms, twice that in the head."""
    ms = [
        (1.0 + 2.0 * batch) / (tp * speed) * (2.0 if u == units - 1 else 1.0) for u in range(units)
    ]
    states = [4 * local_parameters(MODEL, min(u, MODEL.head_unit), tp=tp) for u in range(units)]
    return {
        "model": {
            "model_name": "OPT-350",
            "num_layers": units,
            "parameters": {
                "total_parameters_bytes": sum(states),
                "parameters_per_layer_bytes": states,
                "activation_parameters_bytes": [batch * LENGTH * MODEL.hidden * 4] * units,
            },
        },
        "execution_time": {
            "total_time_ms": sum(ms) + 52.0 / tp,
            "forward_backward_time_ms": sum(ms),
            "batch_generator_time_ms": 0.0,
            "optimizer_time_ms": 52.0 / tp,
            "layer_compute_total_ms": ms,
        },
        "execution_memory": {
            "layer_memory_total_mb": [5 * s / 2**20 + 100.0 * batch / tp for s in states]
        },
    }


def write_folder(folder: Path, **changes: int) -> Path:
    """Write A100 (tp 1 and 2) and V100 (tp 1, four times slower), batches 1, 2 and 4."""
    folder.mkdir(exist_ok=True)
    for chip, tp, speed in (("A100", 1, 4.0), ("A100", 2, 4.0), ("V100", 1, 1.0)):
        for batch in (1, 2, 4):
            text = json.dumps(document(tp, batch, speed, **changes))
            (folder / f"{chip}_tp{tp}_bs{batch}.json").write_text(text)
    return folder
