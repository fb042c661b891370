"""lm-eval against `tutti serve`: log-likelihoods of a local task beside those of transformers.

Needs lm-eval (`pip install 'lm-eval[api]'`) and a model folder with a tokenizer; works offline. The
server is started here, in fp32 on the CPU. The task asks which of two endings is likelier, of texts
that are made here.

    python benchmarks/serve_lm_eval.py FOLDER [--texts 20]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TASK = """
task: local_endings
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data}}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{[first, second]}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "once", "upon", "time")


def documents(count: int) -> list[dict[str, str]]:
    """Return texts with two endings each."""
    random.seed(0)

    def words(number: int) -> str:
        return "".join(f" {random.choice(WORDS)}" for _ in range(number))

    return [
        {"text": words(6 + number % 9).strip(), "first": words(2), "second": words(3)}
        for number in range(count)
    ]


def by_transformers(folder: str, given: list[dict[str, str]], dtype: str) -> list[list[float]]:
    """Return the log-likelihood of each ending."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for one in given:
        row = []
        for ending in (one["first"], one["second"]):
            before = tokenizer(one["text"], add_special_tokens=False).input_ids
            whole = tokenizer(one["text"] + ending, add_special_tokens=False).input_ids
            with torch.no_grad():
                logits = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
            at = range(len(before), len(whole))
            row.append(sum(float(logits[i - 1, whole[i]]) for i in at))
        found.append(row)
    return found


def by_server(url: str, folder: str, room: Path, given: list[dict[str, str]]) -> list[list[float]]:
    """Return the same as lm-eval asks a server for it."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    data = room / "data.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in given))
    (room / "task.yaml").write_text(TASK.format(data=data))
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": Path(folder).name, "base_url": f"{url}/completions", "tokenizer": folder,
            "tokenizer_backend": "huggingface", "num_concurrent": 4, "max_retries": 1,
        },
        tasks=["local_endings"],
        task_manager=TaskManager(include_path=str(room), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )  # fmt: skip
    samples = sorted(results["samples"]["local_endings"], key=lambda one: one["doc_id"])
    return [[float(answer[0][0]) for answer in one["resps"]] for one in samples]


def main() -> None:
    """Ask both, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--texts", type=int, default=20)
    given = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    folder = str(Path(given.folder).resolve())
    command = [sys.executable, "-m", "tutti.cli.main", "serve", folder, "--port", "0"]
    server = subprocess.Popen(
        [*command, "--device", "cpu", "--dtype", "fp32"], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    try:
        url, texts = "", documents(given.texts)
        for line in server.stderr:
            url = url or next(iter(re.findall(r"http://\S+", line)), "")
            if "is ready" in line:
                break
        with tempfile.TemporaryDirectory() as room:
            served = by_server(url, folder, Path(room), texts)
    finally:
        server.terminate()
        server.wait(60)
    wrong = False
    for dtype in ("float32", "float64"):  # the wider one shows that no number is its own witness
        expected = by_transformers(folder, texts, dtype)
        pairs = [
            (mine, theirs)
            for rows in zip(served, expected, strict=True)
            for mine, theirs in zip(*rows, strict=True)
        ]
        wrong |= compared(pairs, dtype) > 1e-4 and dtype == "float32"
        others = [theirs for _, theirs in pairs]
        control = [(mine, theirs) for (mine, _), theirs in zip(pairs, others[1:], strict=False)]
        if compared(control, f"{dtype}, each of the next text (must differ)") <= 1e-4:
            raise SystemExit("the comparison cannot fail: it says nothing")
    sys.exit(1 if wrong else 0)


def compared(pairs: list[tuple[float, float]], dtype: str) -> float:
    """Print how far the two are from each other; return the largest difference."""
    differences = [abs(mine - theirs) for mine, theirs in pairs]
    same = sum(not each for each in differences)
    low, high = min(mine for mine, _ in pairs), max(mine for mine, _ in pairs)
    print(
        f"{len(pairs)} log-likelihoods from {low:.4f} to {high:.4f} beside transformers in {dtype}:"
        f" largest difference {max(differences):.3g}, mean "
        f"{sum(differences) / len(pairs):.2g}, {same} equal in all bits"
    )
    return max(differences)


if __name__ == "__main__":
    main()
