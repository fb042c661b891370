"""A server in processes of its own, with a tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.warm_commands import started_by

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if tools %}<tool_call>{% endif %}"
)
TEXT = "the quick brown fox jumps over the lazy dog. once upon a time there was a chip. " * 20


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a Hugging Face folder of a tiny llama with random weights, tokenizer and template."""
    import transformers

    torch.manual_seed(0)
    config = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "eos_token_id": 1, "bos_token_id": None, **changes,
    }  # fmt: skip
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).save_pretrained(folder)
    return write_tokenizer(folder)


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of 400 tokens with a chat template; token 1 ends a turn."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    made.save(str(folder / "tokenizer.json"))
    about = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


class Served:
    """`tutti serve` until the end of the block."""

    def __init__(
        self, folder: Path, *options: str, environment: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "tutti.cli.main", "serve", str(folder), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--dtype", "fp32", "--device", "cpu", *options],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )
        self.lines: list[str] = []
        self.url = ""

    def __enter__(self) -> Self:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            found = re.search(r"http://\S+", line)
            if found:
                self.url = found.group(0).removesuffix("/v1")
                break
        os.set_blocking(self.process.stderr.fileno(), False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> int:
        """End it as an operator would; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def wait(self, seconds: float = 120.0) -> None:
        """Wait until requests are taken."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self.process.poll() is None, self.lines
            try:
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise AssertionError("the server did not become ready")

    def pid(self, module: str) -> int:
        """Return the process that runs a module of the server's."""
        for pid in started_by(self.process.pid):
            if f"tutti.server.{module}" in psutil.Process(pid).cmdline():
                return pid
        raise AssertionError(f"no {module}")

    def metric(self, name: str) -> float:
        """Return a gauge or counter."""
        text = httpx.get(f"{self.url}/metrics", timeout=5).text
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert found, text
        return float(found.group(1))
