"""This machine as so many ranks: shares of a CPU, or the first of its accelerators."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.errors import InputError
from tutti.hardware.chip import Dtype
from tutti.hardware.discover import discover
from tutti.hardware.library import shipped
from tutti.hardware.local import has_bf16, is_cpu, local_cluster

GPUS = "\n".join(f"{i}, NVIDIA A800-SXM4-80GB, 81920" for i in range(4))


def gpus(command: list[str]) -> str:
    return GPUS if command[0] == "nvidia-smi" and "--query" in command[1] else ""


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_cpu_is_shared_out(ranks: int) -> None:
    whole = discover(run=lambda _: "").cluster
    found = local_cluster(ranks, whole)
    (pool,), (before,) = found.pools, whole.pools
    assert pool.node.num_chips == ranks
    assert is_cpu(pool.chip)
    for name in ("memory_bytes", "memory_bandwidth"):
        assert getattr(pool.chip, name) * ranks == pytest.approx(getattr(before.chip, name))
    for dtype, flops in before.chip.peak.items():
        assert pool.chip.peak[dtype] * ranks == pytest.approx(flops)
    assert pool.node.host == before.node.host  # the machine's own
    if ranks > 1:
        (island,) = pool.node.islands
        assert list(island.slots) == list(range(ranks))


def test_accelerators_are_counted_off() -> None:
    whole = discover(run=gpus).cluster
    assert local_cluster(None, whole) == whole
    assert local_cluster(4, whole).pools[0].node.num_chips == 4
    two = local_cluster(2, whole).pools[0]
    assert two.node.num_chips == 2
    assert two.chip == whole.pools[0].chip
    with pytest.raises(InputError, match="--ranks 5: this machine has 4 accelerators"):
        local_cluster(5, whole)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("flags : sse2 avx avx2 avx512f amx_bf16", True),
        ("flags : sse2 avx avx2 avx512f avx512_bf16", True),
        ("Features : fp asimd sve bf16 i8mm", True),
        ("Features : fp asimd evtstrm aes crc32 atomics fphp asimddp", False),
        ("flags : sse2 avx avx2", False),
        ("", False),
    ],
)
def test_bf16_instructions(flags: str, wanted: bool, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor : 0\n{flags}\n")
    assert has_bf16(tmp_path) is wanted


def test_without_cpuinfo_nothing_is_promised(tmp_path: Path) -> None:
    assert has_bf16(tmp_path) is False


def test_which_chips_are_cpus() -> None:
    chips = shipped().chips
    assert is_cpu(chips["CPU"])
    assert not is_cpu(chips["A800"])
    assert Dtype.BF16 in chips["CPU"].peak  # the catalog's has it; this machine's may not
