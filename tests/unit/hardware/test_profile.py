"""Profiles: strict both ways; nominal stand-ins say so."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.errors import InputError
from tutti.hardware.chip import Dtype
from tutti.hardware.library import shipped
from tutti.hardware.profile import (
    LinkFigure,
    OperatorTime,
    Profile,
    shipped_profile,
    shipped_profiles,
)

GOOD = Profile(
    chip="H200",
    stack="torch 2.11 + cu130",
    date="2026-01-31",
    origin="tutti profile on one H200",
    launch_floor_s=4e-6,
    operators=(
        OperatorTime(operator="matmul", dtype=Dtype.BF16, shape=(8192, 8192, 8192), seconds=1.4e-3),
    ),
    links=(LinkFigure(kind="host_to_device", latency_s=1e-5, bandwidth=55e9),),
)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    GOOD.save(path)
    assert Profile.load(path) == GOOD
    assert json.loads(path.read_text())["format"] == 2
    assert GOOD.is_measured
    figure = GOOD.link("host_to_device")
    assert figure is not None
    assert figure.bandwidth == 55e9
    assert GOOD.link("NVLink") is None


def test_a_nominal_profile_says_so(tmp_path: Path) -> None:
    nominal = Profile.nominal(shipped().chips["A800"])
    assert not nominal.is_measured
    assert "not measured" in nominal.origin
    assert nominal.launch_floor_s == 4.5e-6
    nominal.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == nominal


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 3}, "'format' is 3, but this tutti reads 1 and 2"),
        ({"format": "1"}, "but this tutti reads 1 and 2"),
        ({"format": [1]}, "but this tutti reads 1 and 2"),
        ({"launch_floor_s": -1}, "must be at least 0"),
        ({"date": "yesterday"}, "write it like 2026-01-31"),
        ({"operator": []}, "did you mean 'operators'"),
        ({"operators": [{"operator": "matmul", "dtype": "bf16", "shape": [0], "seconds": 1}]},
         "must be at least 1"),
        ({"operators": [{"operator": "m", "dtype": "bf16", "shape": [1], "seconds": 0}]},
         "must be more than 0"),
        ({"operators": [{"operator": "m", "dtype": "bf16", "shape": [1], "seconds": 1}] * 2},
         "'operators' holds m [1] twice"),
        ({"links": [{"kind": "x", "latency_s": 0, "bandwidth": 1}] * 2}, "names a kind twice"),
    ],
)  # fmt: skip
def test_bad_profiles_are_one_line(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "p.json"
    GOOD.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError) as caught:
        Profile.load(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith("p.json: ")


def test_a_profile_without_a_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("{}")
    with pytest.raises(InputError, match="'format' is missing"):
        Profile.load(path)
    path.write_text("[1]")
    with pytest.raises(InputError, match="expected a mapping"):
        Profile.load(path)
    path.write_text('{"format": 1, "launch_floor_s": NaN}')
    with pytest.raises(InputError, match="NaN"):
        Profile.load(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip


@given(key=st.sampled_from(["chip", "date", "operators", "links", "launch_floor_s"]), value=JSON)
def test_junk_is_refused_in_one_line_or_valid(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object
) -> None:
    path = tmp_path_factory.mktemp("p") / "p.json"
    GOOD.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    refused = ""
    try:
        Profile.load(path)
    except InputError as error:
        refused = str(error)
    assert "\n" not in refused


def test_the_first_format_is_read_still(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    GOOD.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    found = Profile.load(path)
    assert found.operators == GOOD.operators
    assert (found.operators[0].spread, found.operators[0].kernel) == (0.0, "")


def test_a_measurement_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    GOOD.save(path)
    (line,) = [text for text in path.read_text().splitlines() if "matmul" in text]
    assert json.loads(line.strip(","))["seconds"] == 1.4e-3


def test_found_by_file_or_by_the_name_of_one_that_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutti.hardware.profile.shipped_profiles", lambda: {"h200": GOOD})
    assert Profile.find("H200") is GOOD
    path = tmp_path / "mine.json"
    GOOD.save(path)
    assert Profile.find(str(path)) == GOOD
    with pytest.raises(InputError, match="profile 'h20': no such file, and none ships; did you"):
        Profile.find("h20")
    with pytest.raises(InputError, match="no such file"):
        Profile.find(str(tmp_path / "other.json"))


def test_profiles_that_ship_are_measured_and_of_known_chips() -> None:
    for name, profile in shipped_profiles().items():
        assert profile.is_measured, name
        assert profile.chip in shipped().chips


def test_a_profile_takes_from_the_one_it_extends_what_it_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = OperatorTime(
        operator="attention.forward", dtype=Dtype.BF16, shape=(1, 8, 2, 2, 4, 4), seconds=1e-3
    )
    monkeypatch.setattr(
        "tutti.hardware.profile.shipped_profiles",
        lambda: {"base": replace(GOOD, operators=(*GOOD.operators, other))},
    )
    newer = replace(GOOD, operators=(replace(other, seconds=5e-4),), extends="base")
    path = tmp_path / "p.json"
    newer.save(path)
    found = Profile.load(path)
    assert {(row.operator, row.seconds) for row in found.operators} == {
        *((row.operator, row.seconds) for row in GOOD.operators),
        ("attention.forward", 5e-4),
    }
    replace(newer, extends="bas").save(path)
    with pytest.raises(InputError, match="'extends' is 'bas'; did you mean 'base'"):
        Profile.load(path)


def test_of_a_chip_the_profile_counts_whose_package_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = replace(GOOD, needs="")
    known = {
        "a": replace(GOOD, needs="no-such-package-of-ours"),
        "b": plain,
        "c": replace(GOOD, needs="numpy"),
    }
    monkeypatch.setattr("tutti.hardware.profile.shipped_profiles", lambda: known)
    assert shipped_profile(GOOD.chip) is known["c"]
    del known["c"]
    assert shipped_profile(GOOD.chip) is plain
    assert shipped_profile("no such chip") is None


def test_rows_can_be_held_out() -> None:
    assert GOOD.without_operators(["matmul"]).operators == ()
    assert GOOD.without_operators(["mat"]) == GOOD
    assert GOOD.dtypes == (Dtype.BF16,)
    assert GOOD.without({("matmul", (8192, 8192, 8192))}).operators == ()
    assert GOOD.without({("matmul", (1, 2, 3))}) == GOOD
