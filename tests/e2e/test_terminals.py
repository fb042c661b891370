"""Every quick verb in terminals of other encodings, narrow, closed and gone: never a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tutti.cli.main import run

ENCODINGS = ("ascii", "gbk", "latin-1")
CLUSTER = "name: pair\npools:\n  - {name: cpu, node: CPU-host}\n"
VERBS = {
    "help": ["-h"],
    "chips": ["chips"],
    "one chip": ["chips", "A800"],
    "cluster show": ["cluster", "show", "small-mixed"],
    "cluster list": ["cluster", "list"],
    "model show": ["model", "show", "llama-3-8b"],
    "model list": ["model", "list"],
    "plan": ["plan", "gpt2", "pair.yaml", "--uniform", "pp=2", "--global-batch", "4"],
    "plan, searched": ["plan", "gpt2", "small-mixed", "--global-batch", "32"],
    "show": ["show", "plan.json"],
    "show, listed": ["show", "plan.json", "--schedule"],
    "predict": ["predict", "plan.json"],
    "simulate": ["simulate", "plan.json"],
    "launch": ["launch", "plan.json", "--to", "local"],
    "comm explain": ["comm", "explain", "small-mixed"],
    "data show": ["data", "show", "shipped:tales", "--most", "1"],
    "align help": ["align", "compare", "-h"],
    "accelerator help": ["accelerator", "check", "-h"],
    "wrong model": ["model", "show", "modèle…×"],
    "wrong option": ["plan", "--größe", "1"],
}
# Sentences that go out as they are; the terminal breaks them.
UNBROKEN = ("launch", "show", "show, listed", "simulate", "comm explain")
JSON = ("chips", "cluster show", "model show", "predict", "simulate")


class Terminal:
    """Standard output and error as streams of an encoding."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, make: Callable[[], io.TextIOBase]) -> None:
        self.out, self.err = make(), make()
        monkeypatch.setattr(sys, "stdout", self.out)
        monkeypatch.setattr(sys, "stderr", self.err)

    def run(self, arguments: list[str]) -> int:
        with pytest.raises(SystemExit) as stopped:
            run(arguments)
        return int(stopped.value.code or 0)


class Narrow(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def written(stream: io.TextIOBase) -> bytes:
    stream.flush()
    found = stream.buffer.getvalue()  # type: ignore[attr-defined]
    assert isinstance(found, bytes)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("terminals")
    (folder / "pair.yaml").write_text(CLUSTER)
    plan = ["plan", "gpt2", str(folder / "pair.yaml"), "--uniform", "pp=2", "--global-batch", "4"]
    with pytest.raises(SystemExit) as stopped:
        run([*plan, "-o", str(folder / "plan.json")])
    assert not stopped.value.code
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("TUTTI_DEBUG", raising=False)
    return folder


def code_of(verb: str) -> int:
    return 2 if verb.startswith("wrong") else 0


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.usefixtures("one_search_per_question")
def test_an_encoding(verb: str, encoding: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, lambda: io.TextIOWrapper(io.BytesIO(), encoding))
    assert terminal.run(VERBS[verb]) == code_of(verb)
    out, err = written(terminal.out).decode(encoding), written(terminal.err).decode(encoding)
    assert out if code_of(verb) == 0 else err
    assert "Traceback" not in err
    assert "\\u" not in out + err


@pytest.mark.parametrize("verb", JSON)
def test_json_keeps_its_values(verb: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters that an encoding lacks are escaped in JSON, not replaced."""
    import json

    values = []
    for encoding in ("utf-8", "ascii"):
        with monkeypatch.context() as patch:
            terminal = Terminal(patch, lambda e=encoding: io.TextIOWrapper(io.BytesIO(), e))
            assert terminal.run([*VERBS[verb], "--json"]) == 0
            values.append(json.loads(written(terminal.out)))
    assert values[0] == values[1]


@pytest.mark.parametrize("verb", VERBS)
def test_sixty_columns(verb: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is wider than the terminal but what cannot be broken: a path, a command, a list."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(monkeypatch, lambda: Narrow(io.BytesIO(), "utf-8"))
    assert terminal.run(VERBS[verb]) == code_of(verb)
    assert "Traceback" not in written(terminal.err).decode()
    out = re.sub(r"\x1b\[[0-9;]*m", "", written(terminal.out).decode())
    assert out or code_of(verb)
    if verb not in UNBROKEN:
        assert max(map(len, out.splitlines()), default=0) <= 60


@pytest.mark.parametrize("verb", [v for v in VERBS if code_of(v) == 0])
@pytest.mark.usefixtures("one_search_per_question")
def test_a_pipe_whose_reader_has_gone(
    verb: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(monkeypatch, lambda: io.TextIOWrapper(io.BytesIO(), "utf-8"))
    reader, writer = os.pipe()
    os.close(reader)
    gone = os.fdopen(writer, "w", encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", gone)
    assert terminal.run(VERBS[verb]) == 1
    with contextlib.suppress(BrokenPipeError):
        gone.close()
    assert written(terminal.err) == b""


SHELL = {
    "closed output": ("{} >&-", 0),
    "all closed": ("{} >&- 2>&- <&-", 0),
    "head": ("set -o pipefail; {} | head -1 >/dev/null", None),
    "reader gone at once": ("set -o pipefail; {} | true", None),
    "full disk": ("{} >/dev/full", 1),
}


@pytest.mark.parametrize("how", SHELL)
def test_a_real_shell(how: str, here: Path) -> None:
    line, code = SHELL[how]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", line.format("tutti show plan.json --schedule")],
        capture_output=True,
        timeout=120,
        env=env,
    )
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr
    if code is None:
        assert done.returncode in (0, 1)
        assert done.stderr == b""
    else:
        assert done.returncode == code
    assert len(done.stderr.splitlines()) == (1 if how == "full disk" else 0)


def test_a_closed_stream_does_not_receive_a_file(here: Path) -> None:
    """Left closed, number 1 would be the next opened file's, and prints would go into it."""
    script = (
        "from tutti.cli.shared import terminal\n"
        "terminal.prepare()\n"
        "file = open('kept', 'w')\n"
        "assert file.fileno() > 2, file.fileno()\n"
        "print('said')\n"
    )
    done = subprocess.run(
        ["bash", "-c", 'exec "$0" -c "$1" >&-', sys.executable, script],
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (here / "kept").read_text() == ""


@pytest.mark.parametrize(
    ("verb", "code"), [(["accelerator", "list"], 2), (["profile", "-o", "x.json"], 2),
                       (["model", "show", "gpt2"], 0), (["predict", "plan.json"], 0)],
)  # fmt: skip
def test_a_vendors_module_that_fails(
    verb: list[str], code: int, here: Path, tmp_path: Path
) -> None:
    """Verbs that open devices say it in one line; the others do not notice."""
    pytest.importorskip("torch")
    (tmp_path / "vendor.py").write_text("raise ImportError('libvendor.so.3: cannot open\\nmore')")
    info = tmp_path / "vendor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tutti.accelerators]\nvendor = vendor\n")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-m", "tutti.cli.main", *verb],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == code, done.stderr
    assert done.stderr == (
        "tutti: entry point 'vendor' of tutti.accelerators cannot be imported "
        "(libvendor.so.3: cannot open); mend it or remove it\n"
        if code
        else ""
    )
