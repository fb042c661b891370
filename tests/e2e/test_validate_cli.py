"""`tutti validate`, `tutti calibrate` and `tutti bench predict` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.runs import as_csv, grid
from tutti.cli.main import run


def tutti(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        run([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    file = tmp_path / "runs.csv"
    rows = grid(12)
    rows[5]["gbs"] = "sixty-four"
    file.write_text(as_csv(rows))
    return file


KEYS = [
    *("rows", "scored", "mape_pct", "median_pct", "worst_pct", "constant_mape_pct"),
    *("memory_mape_pct", "spearman", "regret_pct", "inside_pct"),
]


@pytest.mark.parametrize("options", [(), ("--calibrate", 6), ("--calibrate-on", "tp=1")])
def test_validate_as_json(
    runs: Path, options: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = tutti("validate", runs, *options, "--json", capsys=capsys)
    assert code == 0
    found = json.loads(out)
    assert list(found["groups"]["lab"]) == KEYS
    assert found["groups"]["lab"]["rows"] == 12
    assert found["skipped"] == [
        {"id": "lab-005", "why": "'gbs' is 'sixty-four'; expected a plain number"}
    ]


def test_validate_as_a_table(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = tutti("validate", runs, capsys=capsys)
    assert (code, err) == (0, "")
    assert "lab" in out
    assert "left out: 1 row" in out
    assert "1 × 'gbs' is 'sixty-four'" in out


def test_judged_where_nothing_was_seen(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = tutti("validate", runs, "--extrapolate", "--closed-form", capsys=capsys)
    assert (code, err) == (0, "")
    assert "a chip, from its data sheet" in out
    assert "left out: 1 row" in out
    code, out, _ = tutti("validate", runs, "--extrapolate", "--json", capsys=capsys)
    found = json.loads(out)
    assert code == 0
    assert found["judges"]["chip"]["rows"] == 11
    assert {row["id"] for row in found["rows"]} == {f"lab-{i:03d}" for i in range(12) if i != 5}
    assert found["skipped"][0]["id"] == "lab-005"


def test_runs_of_which_none_can_be_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = grid(1)
    file = tmp_path / "runs.csv"
    file.write_text(as_csv([{**row, "step_time_s": "-3"}]))
    code, _, err = tutti("validate", file, "--extrapolate", capsys=capsys)
    assert code == 2
    assert "no run can be judged ('step_time_s' is -3" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("validate", "FILE", "--extrapolate", "--group", "lab"), "chooses its own rows"),
        (("validate", "nowhere.csv"), "no such file"),
        (("validate", "FILE", "--group", "lob"), "did you mean 'lab'?"),
        (("validate", "FILE", "--calibrate-on", "hidden"), "write it like hidden=1024"),
        (("calibrate", "FILE", "-o", "FILE"), "is a file; name a folder"),
        (("calibrate", "FILE", "-o", "here"), "no row belongs to a known stack"),
    ],
)
def test_bad_input_is_one_line(
    runs: Path,
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(runs.parent)
    typed = [str(runs) if a == "FILE" else a for a in arguments]
    code, out, err = tutti(*typed, capsys=capsys)
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert message in err


def test_calibrate_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(as_csv([{**row, "group": "Korth22"} for row in grid(9)]))
    code, out, _ = tutti("calibrate", file, "-o", tmp_path / "made", "--json", capsys=capsys)
    assert code == 0
    found = json.loads(out)
    assert found["rows"] == {"megatron-a100": ["lab-000", "lab-003", "lab-006"]}
    written = json.loads(Path(found["files"][0]).read_text())
    assert written["format"] == 1
    assert written["compute"]["gemm_efficiency"]["unit"] == "1"
    assert "step_time_s" not in json.dumps(written)


def test_bench_predict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = tutti("bench", "predict", "--calculon", tmp_path, "--json", capsys=capsys)
    assert code == 0
    rows = {row["predictor"]: row for row in json.loads(out)["rows"]}
    assert rows["tutti, seconds"]["strategies"] >= 1_000_000
    assert rows["tutti, seconds"]["per_second"] > 0
    assert rows["Calculon"]["note"].startswith("failed: FileNotFoundError")
    assert "llm-analysis" in rows
