"""Discovery: vendors' tables are read from sample text, and this machine is always a cluster."""

from pathlib import Path

import pytest

from tutti.document import Place
from tutti.hardware import smi
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.discover import cpu_chip, discover, match_chip, run_tool
from tutti.hardware.library import shipped
from tutti.hardware.node import Host
from tutti.hardware.topology import LinkKind, Position

NVIDIA = """\
0, NVIDIA A100-SXM4-80GB, 81920
1, NVIDIA A100-SXM4-80GB, 81920
2, NVIDIA A100-SXM4-80GB, 81920
3, NVIDIA A100-SXM4-80GB, 81920
"""

TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-31,64-95\t0\t\tN/A\n"
    "GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-31,64-95\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63\t1\t\tN/A\n"
    "GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63\t1\t\tN/A\n"
    "NIC0\tPXB\tPXB\tSYS\tSYS\t X \n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)

NPU = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.5.2                   Version: 25.5.2                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B2C              | OK            | 94.4        42                0    / 0             |
| 0                         | 0000:66:00.0  | 0           0    / 0          3412 / 65536         |
+===========================+===============+====================================================+
| 1     910B2C              | OK            | 96.6        44                0    / 0             |
| 0                         | 0000:19:00.0  | 0           0    / 0          3404 / 65536         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
"""

NPU_A3 = """\
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | OK            | 178.5       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3416 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -           36                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          3195 / 65536         |
+===========================+===============+====================================================+
"""

XPU = """\
+-----------------------------------------------------------------------------+
| XPU-SMI               Driver Version: 5.0.21.21    XPU-RT Version: 5.0.21   |
|-------------------------------+----------------------+----------------------+
| XPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | XPU-Util  Compute M. |
|                               |             L3-Usage |            SR-IOV M. |
|===============================+======================+======================|
|   0  P800 OAM           N/A   | 00000000:03:00.0 N/A |                    0 |
| N/A   37C  N/A     88W / 400W |      0MiB / 98304MiB |      0%      Default |
|                               |      0MiB /    96MiB |             Disabled |
+-------------------------------+----------------------+----------------------+
|   1  P800 OAM           N/A   | 00000000:05:00.0 N/A |                    0 |
| N/A   41C  N/A     90W / 400W |      0MiB / 98304MiB |      0%      Default |
|                               |      0MiB /    96MiB |             Disabled |
+-------------------------------+----------------------+----------------------+
"""

CPUINFO = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480C
cpu MHz\t\t: 2000.000
flags\t\t: fpu sse2 avx avx2 avx512f avx512_bf16 amx_bf16
"""


def answers(**texts: str):  # type: ignore[no-untyped-def]
    """A machine on which only some tools are installed."""
    keys = {key.replace("_", "-"): text for key, text in texts.items()}

    def run(command: list[str]) -> str:
        return keys.get("-".join(command[:2]) if "topo" in command else command[0], "")

    return run


def test_nvidia_table() -> None:
    devices = smi.parse_nvidia(NVIDIA)
    assert [d.index for d in devices] == [0, 1, 2, 3]
    assert devices[0].name == "NVIDIA A100-SXM4-80GB"
    assert devices[0].memory_bytes == 80 * 2**30
    assert smi.parse_nvidia("NVIDIA-SMI has failed because it couldn't communicate") == ()
    assert smi.parse_nvidia("0, NVIDIA GB10, [N/A]")[0].memory_bytes == 0


def test_npu_tables() -> None:
    devices = smi.parse_npu(NPU)
    assert [(d.index, d.name, d.memory_bytes) for d in devices] == [
        (0, "910B2C", 64 * 2**30),
        (1, "910B2C", 64 * 2**30),
    ]
    assert [d.name for d in smi.parse_npu(NPU_A3)] == ["Ascend910", "Ascend910"]
    assert smi.parse_npu("dcmi module initialize failed. ret is -8005") == ()


def test_xpu_table() -> None:
    devices = smi.parse_xpu(XPU)
    assert [(d.index, d.name, d.memory_bytes) for d in devices] == [
        (0, "P800 OAM", 96 * 2**30),
        (1, "P800 OAM", 96 * 2**30),
    ]
    assert smi.parse_xpu("xpu-smi discovery: no device") == ()


def test_topology_table() -> None:
    topology = smi.parse_topology(TOPOLOGY)
    assert topology.islands == ((0, 1), (2, 3))
    assert topology.numa == (0, 0, 1, 1)
    alone = smi.parse_topology("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\t0\n")
    assert alone.islands == ()
    assert alone.numa == (0,)
    assert smi.parse_topology("") == smi.Topology()


@pytest.mark.parametrize(
    ("name", "mib", "chip"),
    [
        ("NVIDIA H200", 143771, "H200"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100"),
        ("NVIDIA H100 PCIe", 81559, "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40"),
        ("NVIDIA A100-PCIE-40GB", 40960, "A100-40-PCIe"),
        ("NVIDIA A100 80GB PCIe", 81920, "A100-80-PCIe"),
        ("NVIDIA A800-SXM4-80GB", 81920, "A800"),
        ("Tesla V100-SXM2-16GB", 16384, "V100-16"),
        ("Tesla V100-SXM2-32GB-LS", 32768, "V100-32"),
        ("Tesla T4", 15360, "T4"),
        ("NVIDIA L40S", 46068, "L40S"),
        ("NVIDIA B200", 183359, "B200"),
        ("NVIDIA GB200", 189471, "GB200"),
        ("910B3", 65536, "Ascend-910B3"),
        ("Ascend910", 65536, "Ascend-910C-die"),
        ("P800 OAM", 98304, "Kunlun-P800"),
        ("NVIDIA GeForce RTX 4090", 24564, None),
    ],
)
def test_devices_are_found_in_the_catalog(name: str, mib: int, chip: str | None) -> None:
    device = smi.Device(index=0, name=name, memory_bytes=mib * 2**20)
    found = match_chip(device, shipped())
    assert (found.name if found else None) == chip


def test_a_gpu_machine(tmp_path: Path) -> None:
    run = answers(nvidia_smi=NVIDIA, nvidia_smi_topo=TOPOLOGY)
    ports = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    ports.mkdir(parents=True)
    (ports / "rate").write_text("200 Gb/sec (4X HDR)\n")
    (ports / "state").write_text("4: ACTIVE\n")
    cluster = discover(run, tmp_path).cluster
    (pool,) = cluster.pools
    assert (pool.name, pool.chip.name, pool.num_chips) == ("gpu", "A100-80", 4)
    assert [nic.rate for nic in pool.node.nics] == [25e9]
    assert cluster.link(Position("gpu", 0, 0), Position("gpu", 0, 1)).medium == "NVLink"
    assert cluster.link(Position("gpu", 0, 1), Position("gpu", 0, 2)).kind is LinkKind.NODE
    assert Cluster.from_document(cluster.to_document(), Place("x")) == cluster


def test_a_machine_with_everything(tmp_path: Path) -> None:
    odd = "4, NVIDIA GeForce RTX 4090, 24564\n5, NVIDIA A100-SXM4-80GB, 40960\n"
    found = discover(answers(nvidia_smi=NVIDIA + odd, npu_smi=NPU, xpu_smi=XPU), tmp_path)
    names = {pool.name: (pool.chip.name, pool.num_chips) for pool in found.cluster.pools}
    assert names == {
        "gpu0": ("A100-80", 5),
        "npu": ("Ascend-910B2C", 2),
        "xpu": ("Kunlun-P800", 2),
    }
    assert any("RTX 4090" in note and "left out" in note for note in found.notes)
    assert any("assumed as in" in note for note in found.notes)
    link = found.cluster.link(Position("npu", 0, 0), Position("xpu", 0, 0))
    assert link.host_forwarded
    assert link.medium == "shared memory"


def test_a_machine_without_accelerators(tmp_path: Path) -> None:
    found = discover(answers(), tmp_path)
    assert found.cluster.pools[0].name == "cpu"
    assert any("no accelerator" in note for note in found.notes)


def test_the_cpu_as_a_chip() -> None:
    chip = cpu_chip(CPUINFO, Host(cores=4))
    assert chip.peak_flops(Dtype.FP32) == 4 * 2e9 * 64
    assert chip.peak_flops(Dtype.BF16) == 4 * 2e9 * 2048
    assert chip.basis == "partly assumed"
    assert cpu_chip("", Host(cores=1)).peak_flops(Dtype.FP32) == 2e9 * 8


def test_the_machine_at_hand() -> None:
    found = discover()
    assert found.cluster.num_chips >= 1
    assert run_tool(["no-such-tool-here"]) == ""
    assert run_tool(["false"]) == ""
