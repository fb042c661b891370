"""Losses of the same training in bf16 and in fp8, from the same start, on real text.

python benchmarks/text_corpus.py out/corpus
python benchmarks/fp8_curves.py run out/corpus out/curves
python benchmarks/fp8_curves.py draw out/curves --image out/curves/fp8.png

`run` trains a Llama of the 1B shape, with the vocabulary of the corpus, by `tutti train`'s own way
(fp32 masters and moments on both sides) and writes `curves.json`; `draw` needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

PRECISIONS = ("bf16", "fp8")


def model_folder(asked: argparse.Namespace, vocabulary: int) -> Path:
    """Write the config of the model to train; return its folder."""
    from tutti.models.load import catalog_config

    config = dict(catalog_config(asked.model)) | {"vocab_size": vocabulary}
    config |= {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    if asked.layers:
        config["num_hidden_layers"] = asked.layers
    folder = asked.output / "model"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def train(asked: argparse.Namespace, folder: Path, precision: str) -> list[dict[str, Any]]:
    """Train once; return what its metrics file says."""
    from tutti import Trainer

    output = asked.output / precision
    trainer = Trainer.from_pretrained(
        folder, output=str(output), steps=asked.steps, start="random",
        data={
            "train": [{"path": str(asked.corpus / "train"), "kind": "megatron"}],
            "validation": [{"path": str(asked.corpus / "heldout"), "kind": "megatron"}],
        },
        job={
            "sequence_length": asked.sequence_length, "global_batch": asked.batch,
            "micro_batch": [asked.batch], "precision": precision, "offload": False,
            "recompute": False,
        },
        optimizer={"learning_rate": asked.learning_rate, "warmup_steps": asked.steps // 20},
        validation={"every": max(1, asked.steps // 20), "steps": asked.heldout_batches},
        checkpoints={"final": False, "huggingface": False},
    )  # fmt: skip
    trainer.fit(overwrite=True)
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def run(asked: argparse.Namespace) -> None:
    """Train in both precisions and write the curves."""
    corpus = json.loads((asked.corpus / "corpus.json").read_text())
    folder = model_folder(asked, corpus["vocabulary"])
    found: dict[str, Any] = {"corpus": corpus, "model": asked.model, "steps": asked.steps}
    found["tokens_per_step"] = asked.batch * asked.sequence_length
    for precision in PRECISIONS:
        rows = train(asked, folder, precision)
        found[precision] = {
            "training": [(row["step"], row["loss"]) for row in rows if "loss" in row],
            "heldout": [
                (row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row
            ],
            "step_s": statistics.median(row["seconds"] for row in rows if "seconds" in row),
        }
        (asked.output / "curves.json").write_text(json.dumps(found) + "\n")
    print(table(found))


def table(found: dict[str, Any]) -> str:
    """Return held-out losses beside each other."""
    wide, narrow = (dict(map(tuple, found[precision]["heldout"])) for precision in PRECISIONS)
    lines = ["  step     bf16      fp8   difference"]
    for step, loss in wide.items():
        lines.append(f"{step:6d} {loss:8.4f} {narrow[step]:8.4f}   {narrow[step] / loss - 1:+.3%}")
    return "\n".join(lines)


def draw(asked: argparse.Namespace) -> None:
    """Draw the curves."""
    from matplotlib import pyplot

    found = json.loads((asked.output / "curves.json").read_text())
    print(table(found))
    figure, (whole, part) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for precision, colour in zip(PRECISIONS, ("tab:blue", "tab:orange"), strict=True):
        steps, losses = zip(*found[precision]["training"], strict=True)
        whole.plot(steps, losses, color=colour, linewidth=0.8, label=f"{precision}, training")
        steps, losses = zip(*found[precision]["heldout"], strict=True)
        whole.plot(steps, losses, "o", color=colour, markersize=3, label=f"{precision}, held out")
    whole.set(xlabel="step", ylabel="loss")
    whole.legend()
    wide, narrow = (dict(map(tuple, found[precision]["heldout"])) for precision in PRECISIONS)
    shares = [100.0 * (narrow[step] / loss - 1.0) for step, loss in wide.items()]
    part.plot(list(wide), shares, "o-", color="tab:green", markersize=3)
    part.axhspan(-0.5, 0.5, color="0.92")
    part.set(xlabel="step", ylabel="held-out loss of fp8 over bf16 (%)")
    figure.savefig(asked.image or asked.output / "fp8.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("run")
    verb.add_argument("corpus", type=Path)
    verb.add_argument("output", type=Path)
    verb.add_argument("--model", default="llama-3.2-1b")
    verb.add_argument("--layers", type=int)
    verb.add_argument("--steps", type=int, default=500)
    verb.add_argument("--batch", type=int, default=6)
    verb.add_argument("--sequence-length", type=int, default=2048)
    verb.add_argument("--learning-rate", type=float, default=3e-4)
    verb.add_argument("--heldout-batches", type=int, default=16)
    verb.set_defaults(run=run)
    verb = verbs.add_parser("draw")
    verb.add_argument("output", type=Path)
    verb.add_argument("--image", type=Path)
    verb.set_defaults(run=draw)
    asked = parser.parse_args()
    asked.run(asked)


if __name__ == "__main__":
    main()
