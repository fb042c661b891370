"""guidellm beside `tutti bench serve`'s load on one server: do the two tell the same story?

The server's chip is emulated and takes its declared time for every step, so that a busy host does
not decide: what differs, the clients measure differently. Both keep as many streams open as the
engine has slots, with prompts and answers of one length. Needs guidellm (`pip install guidellm`,
or a Python that has it: `--python`).

    python -m benchmarks.serve_clients [--requests 40] [--output 16] [--step-s 0.1] [--json FILE]
        [--python VENV/bin/python]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.serve_plan import PROMPT, SLOTS, deployment, late_share, overrun, write_folder
from tutti.bench.serving_load import load
from tutti.bench.traces import Asked
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Plan
from tutti.server.messages import ServerConfig
from tutti.server.supervisor import Supervisor

BAR = 0.03
WORDS = "the quick brown fox jumps over a lazy dog while seven chips compute one long answer "


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of 400 tokens; one ends an answer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator([WORDS * 20], trainer)
    made.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def one_engine(folder: Path, output: int, step_s: float) -> Plan:
    """Return the plan of the faster of two chips alone."""
    plan = deployment(folder, (1.0, 0.0), output, step_s)
    return replace(plan, pipelines=plan.pipelines[:1], idle=ChipSet.of("slow/0/0"))


def by_tutti(url: str, requests: int, output: int) -> dict[str, float]:
    """Return what our load client sees."""
    random.seed(1)
    asked = [
        Asked(prompt=tuple(random.randrange(2, 390) for _ in range(PROMPT)), new=output)
        for _ in range(requests)
    ]
    found = asyncio.run(load(url, "small", asked, [0.0] * requests, most=SLOTS))
    assert not found.failed, found.first_error
    return {
        "requests/s": found.request_rate, "tokens/s": found.output_rate,
        "per token, median, ms": 1e3 * found.per_token_s["p50"],
    }  # fmt: skip


def by_guidellm(
    python: str, url: str, folder: Path, requests: int, output: int
) -> dict[str, float]:
    """Return what guidellm sees."""
    report = folder.parent / "guidellm.json"
    command = [
        python, "-m", "guidellm", "run",
        "--backend", f"kind=openai_http,target={url},model=small,request_format=/v1/completions",
        "--profile", f"kind=concurrent,streams={SLOTS}",
        "--constraint", f"kind=max_requests,count={requests}",
        "--tokenizer", f"kind=huggingface_auto,model={folder}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={output}",
        "--output", f"kind=json,path={report}", "--disable-console",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"},
    )  # fmt: skip
    if not report.exists():
        raise SystemExit(f"guidellm left no report: {(done.stdout + done.stderr)[-2000:]}")
    metrics: dict[str, Any] = json.loads(report.read_text())["benchmarks"][0]["metrics"]

    def of(name: str, figure: str) -> float:
        return float(metrics[name]["successful"][figure])

    return {
        "requests/s": of("requests_per_second", "mean"),
        "tokens/s": of("output_tokens_per_second", "mean"),
        "per token, median, ms": of("inter_token_latency_ms", "median"),
    }


def main() -> None:
    """Let both load one server, one after the other, ours again in the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--python", default=sys.executable, help="one that has guidellm")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as room:
        folder = write_folder(Path(room) / "model")
        write_tokenizer(folder)
        rows = served(folder, one_engine(folder, given.output, given.step_s), given)
    ours, theirs = rows["tutti bench serve"], rows["guidellm"]
    worst = max(abs(ours[name] / theirs[name] - 1.0) for name in ours)
    print(f"largest difference {100 * worst:.1f} % (bar {100 * BAR:.0f} %)")
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1))
    sys.exit(1 if worst > BAR else 0)


def served(folder: Path, plan: Plan, given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Start the server; return what each client measures."""
    config = ServerConfig(
        folder=str(folder), name="small", engine={"dtype": "fp32"}, port=0, queue=4096
    )
    rows = {}
    with Supervisor(config, plan=plan) as server:
        stop = threading.Event()

        def watch() -> None:
            while not stop.is_set():
                server.look()
                time.sleep(0.1)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            while not any(engine.ready for engine in server.state.engines):
                time.sleep(0.1)
            time.sleep(1.0)
            url = f"http://127.0.0.1:{server.port}"
            by_tutti(url, SLOTS, 2)
            clients: dict[str, Callable[[], dict[str, float]]] = {
                "tutti bench serve": lambda: by_tutti(url, given.requests, given.output),
                "guidellm": lambda: by_guidellm(
                    given.python, url, folder, given.requests, given.output
                ),
                "tutti bench serve, again": lambda: by_tutti(url, given.requests, given.output),
            }
            for name, ask in clients.items():
                before = overrun(server.folder.path)
                rows[name] = ask()
                time.sleep(1.0)
                late = late_share(before, overrun(server.folder.path))
                said = ", ".join(f"{each} {value:.4g}" for each, value in rows[name].items())
                print(f"{name:26} {said}; host late by {100 * late:.1f} %", flush=True)
        finally:
            stop.set()
            watcher.join()
    return rows


if __name__ == "__main__":
    main()
