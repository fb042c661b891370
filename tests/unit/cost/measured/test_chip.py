"""A chip's profile: seconds at any shape, and what is said where nothing was measured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.measured import SHAPES, measured_profile, true_seconds
from tutti.cost.measured.chip import MeasuredChip
from tutti.cost.measured.forms import FORMS, row_flops, row_name
from tutti.errors import InputError
from tutti.hardware.chip import Dtype
from tutti.hardware.profile import OperatorTime, Profile

CHIP = MeasuredChip(measured_profile(), Dtype.BF16)


@pytest.mark.parametrize("operator", SHAPES)
def test_measured_shapes_come_back(operator):
    for direction in FORMS[operator].directions:
        for shape in SHAPES[operator]:
            found = float(CHIP.seconds(operator, direction, shape))
            assert found == pytest.approx(
                true_seconds(operator, shape, direction=direction), rel=0.02
            )


@given(tokens=st.integers(512, 8192), out=st.integers(256, 16384), wide=st.integers(256, 16384))
def test_products_between_are_near(tokens, out, wide):
    found = float(CHIP.seconds("linear", "forward", (tokens, out, wide)))
    assert found == pytest.approx(true_seconds("linear", (tokens, out, wide)), rel=0.12)
    assert CHIP.outside("linear", (tokens, out, wide)) == ()


def test_arrays_are_priced_as_their_numbers_are():
    tokens = np.asarray([512.0, 700.0, 8192.0, 512.0])
    together = CHIP.seconds("linear", "weight_gradient", (tokens, 3000.0, 1024.0))
    alone = [float(CHIP.seconds("linear", "weight_gradient", (t, 3000.0, 1024.0))) for t in tokens]
    np.testing.assert_allclose(together, alone, rtol=1e-12)
    assert together[0] == together[3]


def test_beyond_the_box_the_edge_is_carried_on_and_said():
    shape = (65536, 16384, 16384)
    found = float(CHIP.seconds("linear", "forward", shape))
    edge = float(CHIP.seconds("linear", "forward", (8192, 16384, 16384)))
    assert found == pytest.approx(8 * edge, rel=0.01)
    assert CHIP.outside("linear", shape) == ("linear tokens 6.554e+04 (measured 512 to 8192)",)
    assert CHIP.outside("attention", (1, 64, 8, 8, 64, 64))[0].startswith("attention length 64 ")


def test_what_was_not_measured_has_a_stand_in_and_says_so():
    chip = MeasuredChip(measured_profile(operators=("linear", "attention")), Dtype.BF16)
    assert "priced by memory traffic" in chip.outside("rms_norm", (512, 512))[0]
    moved = 2 * 4096 * 4096 * 2.0
    assert float(chip.seconds("rms_norm", "forward", (4096, 4096))) == pytest.approx(
        moved / 1e12, rel=0.1
    )
    grouped = float(chip.seconds("grouped_linear", "forward", (8192, 1024, 1024, 8)))
    one = float(chip.seconds("linear", "forward", (1024, 1024, 1024)))
    assert grouped == pytest.approx(8 * one)
    assert "single products" in str(chip.stand_in("grouped_linear"))
    head = (2048, 32000, 1024)
    passes = sum(float(chip.seconds("linear", d, head)) for d in FORMS["linear"].directions)
    assert float(chip.seconds("linear_cross_entropy", "forward", head)) == pytest.approx(passes)
    assert float(chip.seconds("linear_cross_entropy", "backward", head)) == 0.0


def test_the_ceiling_is_the_best_product():
    best = max(
        float(FORMS["linear"].flops(shape)) / true_seconds("linear", shape)
        for shape in SHAPES["linear"]
    )
    assert pytest.approx(best) == CHIP.matrix_ceiling
    assert row_flops("linear_cross_entropy.backward", (1, 2, 3)) == 0
    assert row_flops("unheard.of", (1, 2, 3)) == 0


def test_another_number_format_is_refused_in_one_line():
    with pytest.raises(
        InputError, match="no 'linear' in fp32; it measured bf16; run tutti profile"
    ):
        MeasuredChip(measured_profile(), Dtype.FP32)
    with pytest.raises(InputError, match="no 'attention' in bf16: its time was over"):
        MeasuredChip(measured_profile(operators=("linear",)), Dtype.BF16)


def test_a_shape_of_the_wrong_length_is_refused():
    odd = OperatorTime(
        operator=row_name("linear", "forward"), dtype=Dtype.BF16, shape=(8, 8), seconds=1.0
    )
    whole = measured_profile()
    profile = Profile(
        chip="H200", origin="x", launch_floor_s=0, date="2026-01-31",
        operators=(odd, *whole.operators),
    )  # fmt: skip
    with pytest.raises(InputError, match=r"has the shape \[8, 8\]; expected tokens, out, in"):
        MeasuredChip(profile, Dtype.BF16).seconds("linear", "forward", (8, 8, 8))
