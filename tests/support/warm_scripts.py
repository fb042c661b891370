"""Python scripts as forks of a process that has imported what they use: imports take seconds.

A script gets its own process, folder, arguments and output, as `python FILE` gives it; only what it
imports is there already. The process that forks is the fork server of `multiprocessing`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

PRELOADED = (
    "torch", "torch.distributed", "numpy", "safetensors.torch", "transformers",
    "transformers.modeling_utils", "transformers.generation.utils",
    "transformers.models.llama.modeling_llama", "tutti.cli.main", "tutti.train.run.trainer",
    "tutti.nn.model", "tutti.huggingface.tokenizer", "tutti.search.planner", "tutti.serve.engine",
)  # fmt: skip


def run_script(arguments: Sequence[str], *, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS…` in this folder and wait for its end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = context.Process(
            target=_be_script, args=(list(arguments), os.getcwd(), dict(os.environ), out, err)
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(arguments), timeout)
        return subprocess.CompletedProcess(
            list(arguments), process.exitcode, out.read_text("utf-8"), err.read_text("utf-8")
        )


def _be_script(
    arguments: list[str], folder: str, environment: dict[str, str], out: Path, err: Path
) -> None:
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = arguments
    sys.path.insert(0, str(Path(folder, arguments[0]).parent))
    status = 1
    try:
        runpy.run_path(str(Path(folder, arguments[0])), run_name="__main__")
        status = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    sys.exit(status)
