"""What is believed of chips of which no run was seen."""

import pytest

from tutti.cost.constants import registry
from tutti.cost.families import family_median, nominal_label
from tutti.cost.plan.pool_prices import nominal_constants
from tutti.hardware.library import shipped


@pytest.mark.parametrize(
    ("name", "said", "moved"),
    [
        ("Ascend-910C", "; priors of Da Vinci", {"moe_gemm_ratio", "misaligned_slowdown"}),
        ("H20", "; priors of Hopper", {"flash_efficiency"}),
        ("Kunlun-P800", "", set()),
        ("MI300X", "", set()),
    ],
)
def test_a_chip_without_runs_starts_from_its_family_and_says_so(
    name: str, said: str, moved: set[str]
) -> None:
    chip = shipped().chips[name]
    assert nominal_label(chip) == f"nominal, not measured{said}"
    constants = nominal_constants(chip)
    for constant, spec in registry().items():
        if constant in moved:
            assert getattr(constants, constant) == family_median(constant, name) != spec.prior
        elif not constant.startswith(("host", "moe_host")):  # those go by launches
            assert getattr(constants, constant) == spec.prior
