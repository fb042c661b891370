"""Constants from operator measurements: made-up profiles give back what they were made with."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.cost.arrays import Machine, Shape, Strategy
from tutti.cost.calibration.operators import CONSTANTS, calibrate_from_profile
from tutti.cost.calibration.shipped import Calibration
from tutti.cost.constants import Constants, registry
from tutti.cost.operators.operator_times import (
    fused_attention_seconds,
    gemm_seconds,
    memory_bound_seconds,
)
from tutti.errors import InputError
from tutti.hardware.chip import Dtype
from tutti.hardware.library import shipped
from tutti.hardware.profile import LinkFigure, OperatorTime, Profile

CHIP = shipped().chips["A100-80"]
NODE = shipped().node_for(CHIP)
MACHINE = Machine.filled(
    peak=CHIP.peak_flops(Dtype.BF16) * CHIP.sustained,
    memory_bandwidth=CHIP.memory_bandwidth,
    compute_units=CHIP.compute_units,
    link=1.0,
)
TRUE = Constants(
    gemm_efficiency=0.78,
    gemm_fill_s=5e-6,
    wave_quantisation=0.75,
    kernel_gap_s=2.5e-6,
    hbm_efficiency=0.88,
    flash_efficiency=0.55,
    flash_backward_ratio=0.7,
    link_efficiency=0.7,
    link_latency_s=3e-5,
    nic_efficiency=0.6,
    nic_latency_s=1.2e-5,
)
SIZES = (64, 256, 768, 2048, 5120, 8192)
GEMMS = list(itertools.product(SIZES, SIZES[1:], SIZES[1:]))
ATTENTION = list(itertools.product((1, 4), (16, 32), (1024, 4096), (128,)))


def seconds_of(operator, shape, constants=TRUE):
    if operator == "gemm":
        return float(gemm_seconds(*map(float, shape), MACHINE, constants))
    if operator == "copy":
        return float(memory_bound_seconds(float(shape[0]), MACHINE, constants))
    b, a, s, d = shape
    model = Shape.filled(
        hidden=a * d, heads=a, kv_heads=a, d_qk=d, d_v=d, ffn=0, vocab=0, head_vocab=0
    )
    strategy = Strategy.filled(sequence_length=s, sequences=b)
    both = fused_attention_seconds(model, strategy, MACHINE, constants)
    return float(both[operator == "attention_backward"])


def measured(operator, shapes, noise=0.0, seed=0):
    spread = np.random.default_rng(seed).normal(0.0, 1.0, len(shapes))
    return tuple(
        OperatorTime(
            operator=operator,
            dtype=Dtype.BF16,
            shape=shape,
            seconds=seconds_of(operator, shape) * float(np.exp(noise * z)),
        )
        for shape, z in zip(shapes, spread, strict=True)
    )


def profile_of(*operators, links=()):
    return Profile(
        chip="A100-80",
        stack="cuBLAS",
        date="2026-01-31",
        origin="made up by a test",
        launch_floor_s=5e-6,
        operators=tuple(itertools.chain(*operators)),
        links=links,
    )


LINKS = (
    LinkFigure(kind="memory", latency_s=0.0, bandwidth=0.88 * CHIP.memory_bandwidth),
    LinkFigure(kind="host_to_device", latency_s=1e-5, bandwidth=2.4e10),
    LinkFigure(kind="NVLink", latency_s=3e-5, bandwidth=0.7 * NODE.islands[0].bandwidth),
    LinkFigure(kind="network", latency_s=1.2e-5, bandwidth=0.6 * NODE.nic_bandwidth),
)


def full_profile(noise=0.0, shapes=GEMMS[::3]):
    return profile_of(
        measured("gemm", shapes, noise),
        measured("attention", ATTENTION, noise, 1),
        measured("attention_backward", ATTENTION, noise, 2),
        measured("copy", [(2**i,) for i in range(14, 32, 2)], noise, 3),
        links=LINKS,
    )


def held_out_errors(calibration):
    constants = calibration.constants()
    shapes = [("gemm", s) for s in GEMMS if s not in GEMMS[::3]]
    shapes += [("attention", (2, 64, 2048, 128)), ("attention_backward", (2, 64, 2048, 128))]
    return [abs(seconds_of(o, s, constants) / seconds_of(o, s) - 1.0) for o, s in shapes]


def test_known_constants_come_back():
    found = calibrate_from_profile(full_profile())
    constants = found.constants()
    for name in CONSTANTS:
        assert getattr(constants, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name
    assert max(held_out_errors(found)) < 0.01
    assert found.fit.mape_pct < 0.3
    assert "at their priors" not in found.rule


def test_it_says_where_it_came_from_and_what_it_covers(tmp_path):
    profile = full_profile()
    found = calibrate_from_profile(profile)
    assert found.origin == "made up by a test"
    assert found.date == "2026-01-31"
    assert found.chips == ("A100-80",)
    assert found.rows == ()
    assert "(m 64 to 8192, n 256 to 8192, k 256 to 8192)" in found.rule
    assert "link NVLink" in found.rule
    path = found.save(tmp_path)
    assert Calibration.from_text(path.read_text(), path.name) == found


def test_noise_is_averaged_out():
    found = calibrate_from_profile(full_profile(noise=0.03, shapes=GEMMS))
    constants = found.constants()
    assert constants.gemm_efficiency == pytest.approx(0.78, rel=0.02)
    assert constants.flash_efficiency == pytest.approx(0.55, rel=0.04)
    assert 1.0 < found.fit.mape_pct < 4.0
    assert np.mean(held_out_errors(found)) < 0.01


def test_an_outlier_moves_little():
    profile = full_profile()
    slow = replace(profile.operators[0], seconds=10 * profile.operators[0].seconds)
    found = calibrate_from_profile(replace(profile, operators=(slow, *profile.operators[1:])))
    assert np.median(held_out_errors(found)) < 0.01


def test_too_few_operators_leave_the_priors():
    profile = profile_of(measured("gemm", GEMMS[:3]), measured("attention", ATTENTION[:1]))
    found = calibrate_from_profile(profile)
    assert found.compute == {}
    assert found.clusters == {}
    known, constants = registry(), found.constants()
    assert all(getattr(constants, name) == known[name].prior for name in CONSTANTS)
    assert "3 gemm (m 64 to 64, n 256 to 256, k 256 to 2048), too few to fit" in found.rule
    assert f"at their priors: {', '.join(CONSTANTS)}" in found.rule


def test_what_the_shapes_do_not_touch_is_not_called_fitted():
    large = [(m, 4096, 4096) for m in (2048, 4096, 6144, 8192)]  # none waits for memory
    found = calibrate_from_profile(profile_of(measured("gemm", large)))
    assert "gemm_efficiency" in found.compute
    assert "hbm_efficiency" not in found.compute
    assert "at their priors: hbm_efficiency" in found.rule


def test_links_alone_move_only_the_network():
    found = calibrate_from_profile(profile_of(links=LINKS[2:]))
    assert set(found.compute) == set()
    (cluster,) = found.clusters.values()
    assert set(cluster) == {"link_efficiency", "link_latency_s", "nic_efficiency", "nic_latency_s"}
    assert found.constants().nic_efficiency == pytest.approx(0.6, rel=0.01)
    assert "at their priors: gemm_efficiency" in found.rule


def test_odd_rows_and_head_dimensions_free_their_constants():
    odd = [(4096, n, 4096) for n in (4097, 4098, 5001, 8191)]
    heads = [(4, 32, 2048, d) for d in (32, 64, 96, 128)]
    rows = measured("gemm", [*GEMMS[::3], *odd]), measured("attention", heads)
    found = calibrate_from_profile(profile_of(*rows))
    assert {"misaligned_slowdown", "flash_head_dim"} <= set(found.compute)
    prior = registry()["flash_head_dim"].prior  # what `measured` computes with
    assert found.constants().flash_head_dim == pytest.approx(prior, rel=0.02)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"operators": (), "links": ()}, "nothing to fit; it needs gemm"),
        ({"operators": (), "links": LINKS[1:2]}, "nothing to fit"),
        ({"chip": "A101"}, "did you mean"),
        (
            {"operators": (replace(full_profile().operators[0], shape=(1, 2)),)},
            "has the shape [1, 2]; expected m, n, k",
        ),
        (
            {"operators": (replace(full_profile().operators[0], seconds=3.0),)},
            "over 1000 times off the nominal",
        ),
        (
            {"links": (replace(LINKS[2], bandwidth=1.0),)},
            "link NVLink 0: 1 is over 1000 times off",
        ),
    ],
)
def test_nonsense_is_one_line(change, said):
    with pytest.raises(InputError) as error:
        calibrate_from_profile(replace(full_profile(), **change))
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


NAMES = st.sampled_from(["gemm", "attention", "attention_backward", "copy", "softmax"])
OPERATORS = st.builds(
    OperatorTime,
    operator=NAMES,
    dtype=st.sampled_from(list(Dtype)),
    shape=st.lists(st.integers(1, 10**6) | st.integers(1, 10**40), max_size=4).map(tuple),
    seconds=st.floats(1e-9, 1e3),
)


PLAUSIBLE = st.builds(
    lambda shape, factor: OperatorTime(
        operator="gemm",
        dtype=Dtype.BF16,
        shape=shape,
        seconds=factor * seconds_of("gemm", shape),
    ),
    st.sampled_from(GEMMS),
    st.floats(0.01, 100.0),
)


@settings(max_examples=60)
@given(
    st.lists(OPERATORS | PLAUSIBLE, max_size=8, unique_by=lambda o: (o.operator, o.dtype, o.shape))
)
def test_any_profile_is_fitted_or_refused(operators):
    said = ""
    try:
        found = calibrate_from_profile(profile_of(operators))
    except InputError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1
    if not said:
        known = registry()
        for name, fitted in found.compute.items():
            assert known[name].low <= fitted.value <= known[name].high
