"""Files of runs: what is read, what is skipped and why, and that nothing makes it crash."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.runs import COLUMNS, ROW, as_csv, grid
from tutti.cost.calibration.table import load_runs
from tutti.cost.calibration.validate import validate
from tutti.cost.constants import Constants
from tutti.cost.step import price
from tutti.errors import InputError


def loaded(path: Path, *rows: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    file = path / "runs.csv"
    file.write_text(as_csv([{"id": f"row-{i}", **row} for i, row in enumerate(rows)]))
    table, skipped, _ = load_runs(file)
    return [run.id for run in table.runs], {s.id: s.why for s in skipped}


def test_a_plain_row(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(as_csv(grid(8)))
    table, skipped, cells = load_runs(file)
    assert not skipped
    assert len(table) == len(cells) == 8
    assert set(table.shape.hidden) == {2048}
    assert np.all(table.machine.peak == 312e12)
    found = price(table.shape, table.strategy, table.machine, Constants())
    assert np.all(np.isfinite(found.step_seconds))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"step_time_s": ""}, "'step_time_s' is empty"),
        ({"step_time_s": "843 ms"}, "expected a plain number"),
        ({"step_time_s": "-1"}, "expected a number above 0"),
        ({"step_time_s": "nan"}, "expected a number above 0"),
        ({"step_time_s": "1000000"}, "another unit"),
        ({"step_time_s": "0.0001"}, "another unit"),
        ({"step_time_s": "0"}, "expected a number above 0"),
        ({"gbs": ""}, "'gbs' is empty"),
        ({"mbs": ""}, "'mbs' is empty"),
        ({"mbs": "2.5"}, "expected a whole number"),
        ({"gbs": "65"}, "does not divide gbs"),
        ({"n_gpus": "16"}, "tp × pp × dp × cp is 8, but 'n_gpus' is 16"),
        ({"tp": "32", "dp": "8", "n_gpus": "256", "gbs": "64"}, "exceeds the 16 heads"),
        ({"heads": "17"}, "do not divide hidden"),
        ({"hidden": "1e99"}, "at most 1e+06"),
        ({"chip": "A101"}, "in no catalog; did you mean 'A100"),
        ({"peak_tflops": "312e12"}, "but a A100-80 has 312"),
        ({"recompute": "sometimes"}, "known: selectiveop, selective, full, none"),
        ({"shard": "zero2"}, "known: fsdp"),
        ({"precision": "fp32"}, "known: fp4"),
        ({"flash_attn": ""}, "'flash_attn' is empty"),
        ({"flash_attn": "yes"}, "expected 0 or 1"),
        ({"gated_mlp": ""}, "'gated_mlp' is empty"),
        ({"layers": ""}, "model 'GPT' is in no catalog"),
        ({"vocab": ""}, "that of model 'GPT' is not known"),
        ({"experts": "8", "topk": "2"}, "width of the experts"),
        ({"model": "LLAMA3_70B LoRA"}, "LoRA trains adapters only"),
        ({"model": "Nemotron_3_Super"}, "Mamba"),
        ({"model": ""}, "'model' is empty"),
        ({"group": ""}, "'group' is empty"),
        ({"peak_mem_GiB": "80 GiB"}, "expected a plain number"),
    ],
)
def test_an_unusable_row_says_why(tmp_path: Path, change: dict[str, str], why: str) -> None:
    ids, skipped = loaded(tmp_path, ROW, {**ROW, **change})
    assert ids == ["row-0"]
    assert why in skipped["row-1"]


def test_a_utilisation_above_one(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(as_csv([{**ROW, "id": "x", "mfu": "1.7"}], [*COLUMNS, "mfu"]))
    _, skipped, _ = load_runs(file)
    assert "'mfu' is 1.7; expected a share of the 16-bit peak above 0, at most 1 for 16-bit" in (
        skipped[0].why
    )


def kept_with(path: Path, *mfus: str, precision: str = "bf16") -> list[str]:
    """Return the values of `mfu` whose rows are kept, in one file."""
    rows = [{**ROW, "id": mfu, "mfu": mfu, "precision": precision} for mfu in mfus]
    file = path / "runs.csv"
    file.write_text(as_csv(rows, [*COLUMNS, "mfu"]))
    return [run.id for run in load_runs(file)[0].runs]


def test_a_utilisation_in_percent(tmp_path: Path) -> None:
    """By its sign, or by its column: half of it is more than the peak of any format."""
    assert kept_with(tmp_path, "0.452", "45.2%", "45 %", "0", "0.0", "0%") == [
        "0.452", "45.2%", "45 %", "0", "0.0", "0%",
    ]  # fmt: skip
    assert kept_with(tmp_path, "45.2", "38", "0", "101", "1.3") == ["45.2", "38", "0", "1.3"]
    assert kept_with(tmp_path, "0.45", "0.38", "45.2", "120%", "-0.1", "nan", "high") == [
        "0.45", "0.38",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "most"), [("bf16", "0.99"), ("fp8", "1.9"), ("nvfp4", "3.9")]
)
def test_a_utilisation_up_to_the_peak_of_the_format(
    tmp_path: Path, precision: str, most: str
) -> None:
    shares = ["0.99", "1.9", "3.9", "4.1"]
    assert kept_with(tmp_path, *shares, precision=precision) == (shares[: shares.index(most) + 1])


@pytest.mark.parametrize(("precision", "peaks"), [("bf16", 1.0), ("fp8", 2.0), ("nvfp4", 4.0)])
def test_no_step_is_faster_than_the_peak_of_its_format(
    tmp_path: Path, precision: str, peaks: float
) -> None:
    """A step at 1.02 of the peak is refused, one at 0.98 is not; half of attention is left out."""
    file = tmp_path / "runs.csv"
    row = {**ROW, "precision": precision, "mfu": ""}
    file.write_text(as_csv([row]))
    least = float(load_runs(file)[0].least_seconds[0])
    whole = float(load_runs(file)[0].ideal_seconds[0]) / peaks
    assert 0.5 * whole < least < whole
    times = {"slower": least / 0.98, "faster": least / 1.02}
    file.write_text(as_csv([{**row, "id": n, "step_time_s": str(s)} for n, s in times.items()]))
    table, skipped, _ = load_runs(file)
    assert [run.id for run in table.runs] == ["slower"]
    name = {1.0: "16-bit", 2.0: "FP8", 4.0: "FP4"}[peaks]
    assert f"would be 1.02 × the {name} peak of a A100-80 ({312 * peaks:g} TFLOP/s); check" in (
        skipped[0].why
    )


def test_the_same_id_twice(tmp_path: Path) -> None:
    _, skipped = loaded(tmp_path, {**ROW, "id": "x"}, {**ROW, "id": "x"})
    assert skipped == {"x": "another row has the same 'id'"}


def test_public_models_are_looked_up(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    moe = {**ROW, "id": "a", "model": "Qwen3_30B_a3B", "step_time_s": "3"}
    moe |= dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "gated_mlp", "vocab"), "")
    mixtral = {**ROW, "id": "b", "model": "Mixtral-8x7B", "layers": "8", "step_time_s": "3"}
    file.write_text(as_csv([moe, mixtral]))
    table, skipped, _ = load_runs(file)
    assert not skipped
    assert table.shape.experts[0] == 128
    assert table.shape.d_qk[0] == 128
    assert table.shape.moe_layers.tolist() == [48, 8]


@pytest.mark.parametrize("missing", ["gbs", "chip", "tp", "layers", "step_time_s", "notes", "id"])
def test_a_missing_column_is_a_reason(tmp_path: Path, missing: str) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(as_csv(grid(4), [c for c in COLUMNS if c != missing]))
    table, skipped, _ = load_runs(file)
    assert len(table) + len(skipped) == 4
    if missing in ("gbs", "step_time_s"):
        assert {s.why for s in skipped} == {f"'{missing}' is missing: no such column"}


@pytest.mark.parametrize("text", ["", "\n\n", "a,b,c\n1,2,3\n", "\x00\x01"])
def test_no_file_of_runs(tmp_path: Path, text: str) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(text)
    with pytest.raises(InputError) as raised:
        load_runs(file)
    assert "runs.csv: " in str(raised.value)


CELLS = st.one_of(
    st.sampled_from(["", "n/a", "0", "-3", "1e400", "nan", "inf", "1.5", "512 MiB", "∞", "1e-9"]),
    st.integers(-(10**12), 10**12).map(str),
    st.floats().map(str),
    st.text(max_size=12),
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(COLUMNS), CELLS), max_size=12),
    st.lists(st.sampled_from(COLUMNS), max_size=4),
    st.sampled_from(["vTrainSingle", "torchtitan", "MPT-A100", "SC21T1", "MegatronBridge", "lab"]),
)
def test_mutated_files_never_crash(
    tmp_path: Path, changes: list[tuple[int, str, str]], dropped: list[str], group: str
) -> None:
    rows = [{**row, "group": group} for row in grid(6)]
    for number, column, value in changes:
        rows[number][column] = value
    columns = [c for c in COLUMNS if c not in dropped]
    file = tmp_path / "mutated.csv"
    file.write_bytes(as_csv(rows, columns).encode("utf-8", "replace"))
    try:
        table, skipped, cells = load_runs(file)
    except InputError:
        return
    assert len(table) + len(skipped) == len(cells)
    if len(table):
        found = price(table.shape, table.strategy, table.machine, Constants())
        assert np.all(np.isfinite(found.step_seconds))
        assert np.all(found.step_seconds > 0)
    scores = validate(file).groups.values()
    assert sum(score.rows for score in scores) == len(cells)
    assert sum(score.scored for score in scores) == len(table)
