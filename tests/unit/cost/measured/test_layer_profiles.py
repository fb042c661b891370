"""Per-layer profiles: look-ups give back what the files say, and nonsense is one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cost.layer_folder import PUBLISHED, UNITS, document, write_folder
from tutti.cost.measured.layer_profiles import LayerProfiles
from tutti.errors import InputError
from tutti.hardware.library import shipped

published = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs ../shared beside the checkout")


@pytest.fixture
def profiles(tmp_path: Path) -> LayerProfiles:
    return LayerProfiles.load(write_folder(tmp_path / "made-up"))


def test_what_was_measured(profiles):
    assert profiles.chips == ("A100", "V100")
    assert profiles.degrees("A100") == (1, 2)
    assert profiles.batches("V100", 1) == (1, 2, 4)
    assert profiles.num_units == UNITS


def test_a_measured_batch_is_the_file(profiles):
    wanted = document(2, 4, 4.0)
    found = profiles.at("A100", 2, 4)
    assert (1e3 * found.seconds).tolist() == pytest.approx(
        wanted["execution_time"]["layer_compute_total_ms"], rel=1e-15
    )
    states = np.asarray(wanted["model"]["parameters"]["parameters_per_layer_bytes"])
    assert found.fixed_bytes == pytest.approx(5 * states, rel=1e-9)
    assert found.optimizer_s == pytest.approx(0.026, rel=1e-15)
    assert found.flags == ()


@given(st.floats(1, 4))
def test_between_batches_lies_the_line(tmp_path_factory, batch):
    profiles = _made_up(tmp_path_factory)
    found = profiles.at("V100", 1, batch)
    assert found.seconds[0] == pytest.approx(1e-3 * (1 + 2 * batch), rel=1e-12)
    assert found.memory_bytes[3] - found.fixed_bytes[3] == pytest.approx(100 * batch * 2**20)
    assert not found.flags


def _made_up(factory) -> LayerProfiles:
    folder = factory.getbasetemp() / "line"
    return LayerProfiles.load(folder if folder.is_dir() else write_folder(folder))


@pytest.mark.parametrize("batch", [0.5, 6])
def test_outside_is_refused_or_flagged(profiles, batch):
    with pytest.raises(InputError, match=r"outside the measured 1 to 4; measure it, .*extrapolate"):
        profiles.at("A100", 1, batch)
    found = profiles.at("A100", 1, batch, extrapolate=True)
    assert found.seconds[0] == pytest.approx(1e-3 * (1 + 2 * batch) / 4)
    assert len(found.flags) == 1
    assert "outside the measured 1 to 4" in found.flags[0]


def test_one_batch_alone_is_scaled(tmp_path):
    (tmp_path / "A100_tp1_bs2.json").write_text(json.dumps(document(1, 2)))
    profiles = LayerProfiles.load(tmp_path)
    with pytest.raises(InputError, match="the measured 2 only"):
        profiles.at("A100", 1, 4)
    once, twice = profiles.at("A100", 1, 2), profiles.at("A100", 1, 4, extrapolate=True)
    assert twice.seconds == pytest.approx(2 * once.seconds)
    assert twice.fixed_bytes == pytest.approx(once.fixed_bytes)
    assert twice.flags


def test_an_unmeasured_degree_is_refused_even_when_extrapolating(profiles):
    with pytest.raises(InputError, match="measured with tp 1, 2, not 4"):
        profiles.at("A100", 4, 1, extrapolate=True)


@pytest.mark.parametrize(
    ("chip", "name"),
    [("A100-40", "A100"), ("A100-80", "A100"), ("V100-16", "V100"), ("V100-32", "V100"),
     ("A800", None), ("H100", None)],
)  # fmt: skip
def test_chips_are_found_by_alias_or_beginning(profiles, chip, name):
    if chip not in shipped().chips:
        pytest.skip(f"no {chip} in the catalog")
    assert profiles.name_of(shipped().chips[chip]) == name
    if name is not None:
        assert profiles.note(shipped().chips[chip]).startswith(f"{name} for {chip}, tp 1")


def _broken(tmp_path: Path, change, name: str = "A100_tp1_bs1.json") -> str:
    value = document()
    text = change(value)
    (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(value))
    with pytest.raises(InputError) as error:
        LayerProfiles.load(tmp_path)
    assert len(str(error.value).splitlines()) == 1
    assert name in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("execution_memory"), "'execution_memory' is missing"),
        (lambda d: d.update(extra=1), "unknown key 'extra'"),
        (lambda d: d["model"].update(num_layers=25), "26 values, but 'num_layers' is 25"),
        (lambda d: d["model"].update(num_layers=0), "is 0; must be at least 1"),
        (
            lambda d: d["execution_time"]["layer_compute_total_ms"].__setitem__(3, -1.5),
            "layer_compute_total_ms[3] is -1.5; must be at least 0",
        ),
        (lambda d: d["execution_time"].update(optimizer_time_ms="fast"), "'fast'"),
        (lambda d: json.dumps(d).replace("52.0", "NaN"), "NaN is not a number"),
        (lambda d: json.dumps(d).replace("52.0", "1e999"), "not a finite number"),
        (lambda d: "[1, 2]", "expected a mapping"),
        (lambda d: "{", "not valid JSON"),
    ],
)
def test_a_malformed_file_is_one_line(tmp_path, change, said):
    assert said in _broken(tmp_path, change)


@pytest.mark.parametrize(
    "name", ["A100.json", "A100_tp0_bs1.json", "_tp1_bs1.json", "A100_tp1.json"]
)
def test_a_name_that_says_nothing(tmp_path, name):
    assert "is not named like A100_tp1_bs1.json" in _broken(tmp_path, lambda d: None, name)


def test_two_models_in_a_folder(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "V100_tp2_bs1.json").write_text(json.dumps(document(2, 1, units=14)))
    with pytest.raises(InputError, match=r"V100_tp2_bs1.json: 'num_layers' is 14, but 26"):
        LayerProfiles.load(tmp_path)


def test_no_folder_and_an_empty_one(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        LayerProfiles.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no file"):
        LayerProfiles.load(tmp_path)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
PLACES = [
    (), ("model",), ("model", "num_layers"), ("model", "parameters"), ("execution_time",),
    ("model", "parameters", "parameters_per_layer_bytes"), ("execution_memory",),
    ("execution_time", "layer_compute_total_ms"), ("execution_time", "optimizer_time_ms"),
    ("execution_memory", "layer_memory_total_mb"),
]  # fmt: skip


@given(st.sampled_from(PLACES), PLAIN)
def test_whatever_stands_in_a_file_is_read_or_refused(tmp_path_factory, place, value):
    folder = tmp_path_factory.getbasetemp() / "anything"
    folder.mkdir(exist_ok=True)
    whole = document()
    at = whole
    for key in place[:-1]:
        at = at[key]
    if place:
        at[place[-1]] = value
    (folder / "A100_tp1_bs1.json").write_text(json.dumps(whole if place else value))
    said = ""
    try:
        figures = LayerProfiles.load(folder).at("A100", 1, 1)
    except InputError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1
    if not said:
        assert np.isfinite(figures.seconds).all()
        assert (figures.memory_bytes >= figures.fixed_bytes).all()


@published
def test_the_published_profiles_are_reproduced_exactly():
    profiles = LayerProfiles.load(PUBLISHED)
    files = sorted(PUBLISHED.glob("*.json"))
    assert len(profiles.figures) == len(files) == 23
    for path in files:
        chip, tp, batch = path.stem.split("_")
        value = json.loads(path.read_text())
        found = profiles.at(chip, int(tp[2:]), int(batch[2:]))
        times = value["execution_time"]
        assert found.seconds.tolist() == [1e-3 * t for t in times["layer_compute_total_ms"]]
        memory = value["execution_memory"]["layer_memory_total_mb"]
        assert found.memory_bytes.tolist() == [2.0**20 * m for m in memory]
        assert found.optimizer_s == 1e-3 * times["optimizer_time_ms"]


@published
def test_the_published_megabytes_are_binary():
    """The embedding's bytes are exactly five copies of its parameters and what it hands on."""
    profiles = LayerProfiles.load(PUBLISHED)
    for batch in (1, 2, 4, 8):
        found = profiles.at("A100", 1, batch)
        wanted = 5 * found.parameter_bytes[0] + found.boundary_bytes[0]
        assert found.memory_bytes[0] == wanted
    assert found.fixed_bytes[:-1] == pytest.approx(5 * found.parameter_bytes[:-1], rel=0.02)
