"""schemathesis against `tutti serve`: examples of every route of our OpenAPI, right and wrong ones.

Needs schemathesis (`pip install schemathesis`, or a Python that has it: `--python`) and a model
folder with a tokenizer; works offline.
What a schema cannot say (a prompt longer than the context, a token that the vocabulary does not
have, a grammar that is none) may be refused with 400; all else is schemathesis's own rule: no 5xx,
no status or body that is not described, nothing that breaks the schema is accepted.

    python benchmarks/serve_schemathesis.py FOLDER [--examples 1000] [--route /v1/completions]
        [--python VENV/bin/python]
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUTES = (
    "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/models", "/v1/models/{name}",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/tokenize", "/detokenize", "/health",
    "/ready", "/version", "/metrics",
)  # fmt: skip
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "400", "401", "403", "404", "409", "413", "429"]
"""
RUN = "from schemathesis.cli import schemathesis; schemathesis()"


def tried(python: str, url: str, route: str, examples: int, config: Path) -> tuple[bool, str]:
    """Return whether a route withstood, and what schemathesis wrote."""
    command = [
        python, "-c", RUN, "--config-file", str(config), "run", f"{url}/openapi.json",
        "--include-path", route, "--max-examples", str(examples), "--phases", "fuzzing",
        "--continue-on-failure", "--suppress-health-check", "all", "--request-timeout", "60",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return not done.returncode, done.stdout + done.stderr


def main() -> None:
    """Try all routes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--route", action="append", help="several; all")
    parser.add_argument("--python", default=sys.executable, help="one that has schemathesis")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server must not be left behind
    command = [sys.executable, "-m", "tutti.cli.main", "serve", given.folder, "--port", "0"]
    server = subprocess.Popen(
        [*command, "--device", "cpu", "--dtype", "fp32", "--max-length", "48"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stderr is not None
    failed = False
    try:
        url = ""
        for line in server.stderr:
            url = url or next(iter(re.findall(r"http://\S+", line)), "").removesuffix("/v1")
            if "is ready" in line:
                break
        with tempfile.TemporaryDirectory() as room:
            config = Path(room) / "schemathesis.toml"
            config.write_text(CONFIG)
            for route in given.route or ROUTES:
                began = time.perf_counter()
                good, text = tried(given.python, url, route, given.examples, config)
                count = next(iter(re.findall(r"(\d+) generated", text)), "?")
                took = time.perf_counter() - began
                said = "no failure" if good else "FAILED"
                print(f"{route:26} {count:>6} cases  {said}  {took:.0f} s", flush=True)
                if not good:
                    failed = True
                    print(text)
    finally:
        server.terminate()
        server.wait(60)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
