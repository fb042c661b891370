"""A plan for a cluster is refused on a machine that lacks its chips, before a rank is started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.launching import crossed_plan, plan_of
from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.hardware.discover import Run
from tutti.hardware.present import chips_by_vendor
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Plan, Replica
from tutti.ranks.local_capacity import DEVICE, SHARING, require_chips_here, require_node_here


def never() -> Mapping[str, int]:
    raise AssertionError("asked for nothing")


def laptop_plan() -> Plan:
    return plan_of(Cluster.load("laptop"), [[Replica(chips=ChipSet.of("fast/0/0-1"), count=2)]])


def cluster_of(plan: Plan) -> Cluster:
    assert plan.cluster.cluster is not None
    return plan.cluster.cluster


def test_chips_that_are_not_here_are_named() -> None:
    plan = crossed_plan()
    here = {"nvidia": 2, "kunlunxin": 8}
    with pytest.raises(InputError) as caught:
        require_chips_here(plan, cluster_of(plan), {}, lambda: here)
    text = str(caught.value)
    assert "needs 18 chips like A100-80, this machine has 2" in text
    assert "tutti launch" in text
    here = {"nvidia": 18, "kunlunxin": 0}
    with pytest.raises(InputError, match=r"8 chips like Kunlun-P800, this machine has none"):
        require_chips_here(plan, cluster_of(plan), {}, lambda: here)


def test_enough_is_enough() -> None:
    plan = crossed_plan()
    require_chips_here(plan, cluster_of(plan), {}, lambda: {"nvidia": 18, "kunlunxin": 8})


@pytest.mark.parametrize("variable", [DEVICE, SHARING])
def test_who_says_where_ranks_run_is_believed(variable: str) -> None:
    plan = crossed_plan()
    require_chips_here(plan, cluster_of(plan), {variable: "x"}, never)


def test_emulated_chips_are_always_here() -> None:
    plan = laptop_plan()
    require_chips_here(plan, cluster_of(plan), {}, never)


def test_a_vendor_of_which_nothing_is_known_is_left_to_its_rank() -> None:
    document = {"name": "x", "pools": [{"name": "amd", "chip": "MI300X", "nodes": 1}]}
    cluster = Cluster.from_document(document, Place("x"))
    plan = plan_of(cluster, [[Replica(chips=ChipSet.of("amd/0/0-7"), count=8)]])
    require_chips_here(plan, cluster, {}, lambda: {"nvidia": 0})


def test_device_files_count_where_there_are_no_tools(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "davinci0", "davinci_manager"):
        (tmp_path / "dev" / name).touch()
    found = chips_by_vendor(lambda command: "", tmp_path)
    assert found == {"nvidia": 2, "huawei": 1, "kunlunxin": 0}

    def run(command: list[str]) -> str:
        asked = command[0] == "nvidia-smi" and "topo" not in command
        return "".join(f"{i}, NVIDIA A100, 81920\n" for i in range(4)) if asked else ""

    assert chips_by_vendor(run, tmp_path)["nvidia"] == 4
    assert chips_by_vendor(lambda command: "", tmp_path / "nowhere")["nvidia"] == 0


def tool(*names: str, memory: int = 81920) -> Run:
    text = "".join(f"{index}, {name}, {memory}\n" for index, name in enumerate(names))

    def run(command: list[str]) -> str:
        return text if command[0] == "nvidia-smi" and "topo" not in command else ""

    return run


def node_cluster(chip: object) -> Cluster:
    named = chip if isinstance(chip, str) else "Part"
    document: dict[str, object] = {"name": "x", "pools": [
        {"name": "p", "chip": named, "nodes": 1, "chips_per_node": 2}]}  # fmt: skip
    if not isinstance(chip, str):
        document["chips"] = [chip]
    return Cluster.from_document(document, Place("x"))


A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"


def test_a_node_must_be_what_the_cluster_file_says() -> None:
    cluster = node_cluster("A100-80")
    for run in (tool(A100, A100), tool(A100, A100, H100)):
        require_node_here("p/0", cluster, {}, run)
    cases = [
        (tool(H100, H100), "2 × H100"), (tool(A100, H100), "1 × A100-80, 1 × H100"),
        (tool(A100), "has 1 × A100-80;"), (tool("NVIDIA X1", "NVIDIA X1"), "2 × NVIDIA X1"),
        (tool(), "this host has none"),
        (tool(A100, A100, memory=40960), "2 × A100-80 of 40.0 GiB"),
    ]  # fmt: skip
    for run, words in cases:
        with pytest.raises(InputError, match=r"node p/0: the cluster file says 2 × A100-80") as no:
            require_node_here("p/0", cluster, {}, run)
        assert words in str(no.value)
    require_node_here("p/0", cluster, {DEVICE: "cpu"}, tool(H100))


def test_a_chip_of_the_cluster_file_itself_may_be_any_of_its_vendor() -> None:
    chip = {"name": "Part", "base": "H100", "memory_bytes": "40 GiB"}
    require_node_here("p/0", node_cluster(chip), {}, tool(H100, H100))
    with pytest.raises(InputError, match=r"says 2 × Part of 40\.0 GiB, this host has 1 × Part;"):
        require_node_here("p/0", node_cluster(chip), {}, tool(H100))
    # also one that the catalog does not know at all, but no other vendor's
    new = "NVIDIA B999 Ultra"
    require_node_here("p/0", node_cluster(chip), {}, tool(new, new))
    with pytest.raises(InputError, match=r"2 × Part of 40\.0 GiB, this host has 2 × H100;"):
        require_node_here("p/0", node_cluster({**chip, "vendor": "Huawei"}), {}, tool(H100, H100))
