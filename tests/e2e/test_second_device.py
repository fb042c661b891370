"""A device that is neither the host nor a GPU, in processes of its own: nothing above names one."""

from __future__ import annotations

import json

import pytest

from tests.support import noise_anywhere, train_anywhere
from tests.support.second_process import second_device
from tutti.accelerator import open_accelerator
from tutti.accelerator.registry import operator_names

KINDS = ("dense", "experts", "latent", "tied", "alibi", "expert-bias")
ALWAYS = {"adamw", "linear_cross_entropy", "latent_attention", "linear", "rotary", "store_pages"}


def check(*operators: str) -> dict[str, object]:
    options = [option for name in operators for option in ("--operator", name)]
    done = second_device("-m", "tutti.cli.main", "accelerator", "check", "--json", *options)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    report: dict[str, object] = json.loads(done.stdout)
    assert report["device"] == "slate:0"
    assert report["ok"] is True
    return report


def test_its_operators_conform() -> None:
    report = check(*sorted(ALWAYS))
    assert {o["subject"] for o in report["outcomes"]} == ALWAYS  # type: ignore[attr-defined]


@pytest.mark.slow  # the host is asked about each of them, always
@pytest.mark.parametrize("operator", sorted({*operator_names()} - ALWAYS))
def test_its_other_operators_conform(operator: str) -> None:
    assert check(operator)["ok"]


@pytest.mark.slow  # the host itself is asked always
def test_the_device_itself_conforms() -> None:
    script = (
        "from tutti.accelerator import open_accelerator\n"
        "from tutti.accelerator.conformance import collectives, device\n"
        "chip = open_accelerator()\n"
        "for o in (*device.check(chip), *collectives.check(chip)):\n"
        "    print(chip.device, o.check, o.verdict, o.detail, sep='|')\n"
    )
    done = second_device("-c", script)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split("|") for line in done.stdout.splitlines()]
    assert {row[0] for row in rows} == {"slate:0"}
    assert not [row for row in rows if row[2] == "failed"]
    passed = {row[1] for row in rows if row[2] == "passed"}
    assert passed >= {
        "memory limit",
        "memory limit in backward",
        "lanes in order",
        "random state restored",
        "pinned copies",
        "graph replayed",
        "graphs of forward and backward",
        "collectives among 1, slateccl",
        "collectives among 2, slateccl",
    }


def test_models_train_on_it_as_on_the_host() -> None:
    done = second_device("-m", "tests.support.train_anywhere", "slate", *KINDS)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["device"] == "slate:0"
    host = open_accelerator("cpu")
    for kind in KINDS:
        expected = train_anywhere.losses(host, kind)
        assert found["losses"][kind] == pytest.approx(expected, rel=1e-5), kind
        assert expected[-1] < expected[0]


def test_moments_are_added_up_on_it_wherever_they_are() -> None:
    done = second_device("-m", "tests.support.noise_anywhere", "slate")
    assert done.returncode == 0, done.stderr[-2000:]
    found, host = json.loads(done.stdout), open_accelerator("cpu")
    for kind in noise_anywhere.KINDS:
        expected = noise_anywhere.sums(host, kind)
        assert expected[-1][0] > 0
        for own, other in zip(found[kind], expected, strict=True):
            assert own == pytest.approx(other, rel=1e-4), kind


def test_tensors_of_two_devices_do_not_mix() -> None:
    """Code that forgets to move a tensor must fail here as it would on a chip."""
    script = (
        "import torch, tests.support.python_device as second\n"
        "try:\n"
        "    torch.ones(3, device='slate') + torch.ones(3)\n"
        "except second.MixedDevicesError as error:\n"
        "    print(error)\n"
    )
    done = second_device("-c", script)
    assert "a tensor on cpu among tensors on slate:0" in done.stdout, done.stderr[-1000:]
