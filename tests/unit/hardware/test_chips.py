"""The chip catalog: sane figures, each with its source; lookups and stand-in formats."""

import re

import pytest

from tutti.document import Place, build
from tutti.errors import InputError
from tutti.hardware.chip import Chip, Dtype
from tutti.hardware.library import shipped

CHIPS = list(shipped().chips.values())
HERE = Place("test")

# Dense peaks as the vendors publish them, TFLOP/s.
PEAKS = {
    ("V100-32", "fp16"): 125,
    ("V100-16", "fp16"): 125,
    ("T4", "fp16"): 65,
    ("A100-40", "bf16"): 312,
    ("A100-80", "bf16"): 312,
    ("A100-80-PCIe", "bf16"): 312,
    ("A800", "bf16"): 312,
    ("L40S", "bf16"): 362.05,
    ("H20", "bf16"): 148,
    ("H100", "bf16"): 989.4,
    ("H800", "bf16"): 989.4,
    ("H200", "bf16"): 989.4,
    ("B200", "bf16"): 2250,
    ("GB200", "bf16"): 2500,
    ("GB300", "bf16"): 2500,
    ("MI250X", "bf16"): 383,
    ("MI250X-GCD", "bf16"): 191.5,
    ("MI300X", "bf16"): 1307.4,
    ("Ascend-910B2", "bf16"): 376,
    ("Ascend-910B3", "bf16"): 313,
    ("Ascend-910C", "bf16"): 752,
    ("Kunlun-R200", "fp16"): 128,
    ("Kunlun-P800", "bf16"): 345,
}


@pytest.mark.parametrize(("name", "dtype"), PEAKS)
def test_peaks_are_the_published_dense_ones(name: str, dtype: str) -> None:
    chip = shipped().chips[name]
    assert chip.peak_flops(Dtype(dtype)) == PEAKS[name, dtype] * 1e12


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_every_figure_has_a_source(chip: Chip) -> None:
    for figure in chip.figures:
        source = chip.source(figure)
        assert source != "not stated", figure
        assert source.startswith("assumed: ") or re.search(r"\d{4}|smi", source), (figure, source)
    assert chip.watts is not None
    assert not chip.measured


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_narrower_formats_are_not_slower(chip: Chip) -> None:
    order = [Dtype.FP32, Dtype.TF32, Dtype.BF16, Dtype.FP8, Dtype.FP4]
    peaks = [chip.peak[dtype] for dtype in order if dtype in chip.peak]
    assert peaks == sorted(peaks)
    if chip.supports(Dtype.BF16) and chip.supports(Dtype.FP16):
        assert chip.peak[Dtype.BF16] == chip.peak[Dtype.FP16]
    # Flop per byte of memory bandwidth: a slip of a thousand shows here.
    half = chip.compute_dtype(Dtype.BF16)
    assert half is not None
    assert 10 < chip.peak[half] / chip.memory_bandwidth < 500
    assert 1e-7 < chip.launch_overhead_s < 1e-4


def test_names_and_aliases_are_unique() -> None:
    spellings = [s.casefold() for chip in CHIPS for s in (chip.name, *chip.aliases)]
    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize(
    "spelling", ["a100_80gb", "A100-80G-SXM", "h100_80gb", "ascend 910b", "P800 OAM"]
)
def test_chips_are_found_by_alias(spelling: str) -> None:
    assert shipped().chip(spelling, HERE).name in shipped().chips


def test_an_unknown_chip_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"^f: 'chip' is 'A801'; did you mean 'A800'\?$"):
        shipped().chip("A801", Place("f").key("chip"))


def test_missing_formats() -> None:
    v100 = shipped().chips["V100-32"]
    assert not v100.supports(Dtype.BF16)
    assert v100.compute_dtype(Dtype.BF16) is Dtype.FP16
    assert v100.peak_flops(Dtype.BF16, fallback=True) == 125e12
    with pytest.raises(InputError, match=r"'V100-32' has no bf16; it has fp64, fp32, fp16"):
        v100.peak_flops(Dtype.BF16)
    with pytest.raises(InputError, match="no int8"):
        v100.peak_flops(Dtype.INT8, fallback=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peak": {}}, "'peak' is empty"),
        ({"peak": {"bf61": 1e12}}, "did you mean 'bf16'"),
        ({"peak": {"bf16": -1}}, "must be more than 0"),
        ({"peak": {"bf16": float("nan")}}, "not a finite number"),
        ({"peak": {"bf16": "312 TFLIP/s"}}, "unknown unit"),
        ({"memory_bytes": 0}, "must be more than 0"),
        ({"memory_bandwidth": "fast"}, "write it like"),
        ({"memory": "80 GB"}, "did you mean 'memory_bytes'"),
        ({"name": "a/b"}, "letters, digits"),
        ({"name": 910}, "expected text"),
        ({"sources": {"pike": "x"}}, "names 'pike'"),
        ({"sources": {"peak.fp8": "x"}}, "no figure of this chip"),
        ({"measured": "yes"}, "true or false"),
    ],
)
def test_bad_chips_are_one_line(change: dict[str, object], message: str) -> None:
    good = {
        "name": "X1",
        "vendor": "Acme",
        "peak": {"bf16": "1 TFLOP/s"},
        "memory_bytes": "1 GB",
        "memory_bandwidth": "1 GB/s",
    }
    assert build(Chip, good, HERE).peak_flops(Dtype.BF16) == 1e12
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        build(Chip, good | change, HERE)
    assert "\n" not in str(caught.value)
