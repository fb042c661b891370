"""One table of exit codes, true for every verb."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tutti.cli import main
from tutti.errors import EXIT_CODES, DamagedError, InputError, StoppedError, TuttiError, error_with

DOCS = Path(__file__).parents[3] / "docs" / "reference"
ERRORS: list[tuple[BaseException, int]] = [
    (TuttiError("a rank died"), 1),
    (OSError(28, "No space left on device"), 1),
    (InputError("no such file"), 2),
    (DamagedError("does not match its checksum"), 2),
    (StoppedError("stopped"), 130),
    (KeyboardInterrupt(), 130),
    (StoppedError("stopped", by=signal.SIGTERM), 143),
]
VERBS = sorted(
    {info.name or info.callback.__name__ for info in main.app.registered_commands if info.callback}
)


def test_the_table_in_the_docs_is_this_one() -> None:
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\d+) \| (.*?) \|$", text, re.MULTILINE))
    assert {int(code): said for code, said in rows.items()} == EXIT_CODES
    assert "errors.md#exit-codes" in (DOCS / "command-line.md").read_text(encoding="utf-8")


def test_an_error_of_another_process_keeps_its_code() -> None:
    for error, code in ERRORS:
        if isinstance(error, TuttiError):
            assert error.exit_code == code
            assert error_with(code, "again").exit_code == code


@pytest.mark.parametrize(
    ("verb", "error", "code"),
    [
        *((verb, KeyboardInterrupt(), 130) for verb in VERBS),
        *(("train", error, code) for error, code in ERRORS),
    ],
)
def test_every_verb_ends_with_the_code_of_its_error(
    verb: str, error: BaseException, code: int, monkeypatch: Any, capfd: Any
) -> None:
    """Whatever a verb raises, before or after it has begun."""
    command = next(
        info for info in main.app.registered_commands
        if (info.name or getattr(info.callback, "__name__", "")) == verb
    )  # fmt: skip

    def fails() -> None:
        raise error

    fails.__name__ = verb
    monkeypatch.delenv("TUTTI_DEBUG", raising=False)
    monkeypatch.setattr(command, "callback", fails)
    with pytest.raises(SystemExit) as ended:
        main.run([verb])
    assert ended.value.code == code
    err = capfd.readouterr().err
    assert len(err.splitlines()) == (0 if isinstance(error, KeyboardInterrupt) else 1)


MISSING = {
    "agent": ["--join", "nowhere", "--node", "fast/0"],
    "calibrate": ["nowhere.csv", "-o", "out"],
    "chips": ["A801"],
    "convert": ["nowhere", "-o", "out"],
    "dashboard": ["nowhere"],
    "evaluate": ["nowhere", "nowhere.jsonl"],
    "generate": ["nowhere", "a prompt"],
    "launch": ["nowhere.json"],
    "plan": ["llama-2-7", "small-mixed"],
    "predict": ["nowhere.json"],
    "profile": ["gpt3", "-o", "nowhere/out.json"],
    "report": ["nowhere"],
    "serve": ["nowhere"],
    "show": ["nowhere.json"],
    "simulate": ["nowhere.json"],
    "train": ["nowhere.yaml"],
    "validate": ["nowhere.csv"],
    "accelerator check": ["--operator", "adition"],
    "align": ["nowhere", "nowhere"],
    "bench plan": ["nowhere"],
    "bench fabric prices": ["nowhere"],
    "cluster show": ["nowhere"],
    "comm bench": ["--op", "adition"],
    "data show": ["nowhere.jsonl"],
    "doctor": ["nowhere.yaml"],
    "doctor check": ["--plan", "nowhere.json"],
    "doctor dumps": ["nowhere"],
    "doctor logs": ["nowhere.log"],
    "doctor run": ["nowhere"],
    "job add": ["nowhere", "fast/0"],
    "job drain": ["nowhere", "fast/0"],
    "job replan": ["nowhere"],
    "fleet export": ["small-mixed", "--to", "slurm"],
    "fleet import": ["nowhere.conf", "--node", "HGX-H800"],
    "fleet place": ["nowhere.csv", "small-mixed"],
    "fleet simulate": ["nowhere.csv", "small-mixed"],
    "fabric probe": ["nowhere.yaml"],
    "fabric watch": ["nowhere.yaml", "nowhere.json"],
    "fabric design": ["--chips", "16", "--switch", "51T"],
    "job status": ["nowhere"],
    "model show": ["llama-2-7"],
    "recipe show": ["sftt"],
    "recipe copy": ["sftt"],
    "recipe places": ["nowhere.yaml"],
}


@pytest.mark.parametrize("verb", sorted(MISSING))
def test_bad_input_is_2(verb: str, monkeypatch: Any, tmp_path: Path, capfd: Any) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TUTTI_DEBUG", raising=False)
    with pytest.raises(SystemExit) as ended:
        main.run([*verb.split(), *MISSING[verb]])
    assert ended.value.code == 2, capfd.readouterr().err
    assert "Traceback" not in capfd.readouterr().err


def test_every_verb_is_tried() -> None:
    groups = {str(group.name) for group in main.app.registered_groups}
    assert {verb.split()[0] for verb in MISSING} == {*VERBS, *groups}
