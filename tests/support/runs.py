"""Files of measured runs for tests: a synthetic one, and the shared one where it is present."""

from __future__ import annotations

import csv
import io
from pathlib import Path

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "published_runs.csv"

COLUMNS = [
    *("id", "group", "model", "layers", "hidden", "heads", "kv_heads", "ffn", "gated_mlp"),
    *("vocab", "seq", "experts", "topk", "chip", "peak_tflops", "n_gpus", "tp", "pp", "vpp"),
    *("dp", "cp", "ep", "shard", "seq_par", "mbs", "gbs", "recompute", "flash_attn"),
    *("precision", "step_time_s", "peak_mem_GiB", "config_complete", "notes"),
]

ROW = {
    "group": "lab",
    "model": "GPT",
    "layers": "24",
    "hidden": "2048",
    "heads": "16",
    "kv_heads": "16",
    "ffn": "8192",
    "gated_mlp": "0",
    "vocab": "51200",
    "seq": "2048",
    "chip": "A100-80",
    "peak_tflops": "312",
    "n_gpus": "8",
    "tp": "1",
    "pp": "1",
    "vpp": "1",
    "dp": "8",
    "cp": "1",
    "ep": "1",
    "shard": "ddp",
    "seq_par": "0",
    "mbs": "2",
    "gbs": "64",
    "recompute": "none",
    "flash_attn": "1",
    "precision": "bf16",
    "step_time_s": "1.0",
}


def grid(count: int = 12) -> list[dict[str, str]]:
    """Return rows of one model under different degrees, with plausible step times."""
    rows = []
    for i in range(count):
        tp, pp = (1, 2, 4, 8)[i % 4], (1, 2)[i // 4 % 2] if i % 4 < 3 else 1
        micro_batch = (1, 2, 4)[i % 3]
        batch = 64 + 64 * (i // 6)
        rows.append(
            {
                **ROW,
                "id": f"lab-{i:03d}",
                "tp": str(tp),
                "pp": str(pp),
                "dp": str(8 // (tp * pp)),
                "mbs": str(micro_batch),
                "gbs": str(batch),
                "step_time_s": f"{0.9 * batch / 64 * (1 + 0.05 * (tp - 1)) * (1 + 0.1 * pp):.4f}",
            }
        )
    return rows


def as_csv(rows: list[dict[str, str]], columns: list[str] | None = None) -> str:
    """Return rows as the text of a file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or COLUMNS, extrasaction="ignore", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
