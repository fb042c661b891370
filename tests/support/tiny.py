"""The smallest questions to the planner: a tiny model, two pools of two chips."""

from __future__ import annotations

import json
from pathlib import Path

MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
CLUSTER = """
name: pair
pools:
  - {name: new, chip: A100-80, chips_per_node: 2, nodes: 2, price_per_chip_hour: 2}
  - {name: old, chip: V100-32, chips_per_node: 2}
"""


def write_model(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def write_cluster(path: Path) -> Path:
    path.write_text(CLUSTER)
    return path
