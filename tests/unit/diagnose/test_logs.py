"""Logs in the forms that frameworks write, in our own words, and what the doctor makes of them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import yaml

from tutti.diagnose.finding import Component, Finding
from tutti.diagnose.logs import gate as gates
from tutti.diagnose.logs.collect import collect
from tutti.diagnose.logs.gate import Gate
from tutti.diagnose.logs.identity import Identity, of_line
from tutti.diagnose.logs.reading import cleaned
from tutti.diagnose.logs.reason import diagnose
from tutti.diagnose.logs.signatures import own_catalog, with_own_signatures
from tutti.diagnose.logs.templates import TemplateTree
from tutti.errors import InputError

WATCHDOG = (
    "[rank{rank}]:[E1118 02:00:0{rank}.000 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum={number}, OpType=ALLREDUCE, NumelIn=8, "
    "NumelOut=8, Timeout(ms)=600000) ran for 600013 milliseconds before timing out.\n"
)


def answer(tmp_path: Path, text: str | bytes, name: str = "job.log") -> Finding:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return diagnose(collect([path], own_catalog()))


CASES = {
    name: (case["component"], case["log"])
    for name, case in yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text()).items()
}


@pytest.mark.parametrize("name", CASES)
def test_component(name: str, tmp_path: Path) -> None:
    wanted, text = CASES[name]
    found = answer(tmp_path, text)
    assert found.component.value == wanted
    assert not found.healthy
    assert found.exit_code == (2 if wanted == "undetermined" else 1)
    assert found.evidence
    assert found.evidence[0].line >= 1
    if wanted == "undetermined":
        assert found.confidence == 0.0
        assert found.next_steps
    else:
        assert found.remedy


def test_where(tmp_path: Path) -> None:
    assert answer(tmp_path, CASES["ecc"][1]).where.ranks == (5,)
    found = answer(tmp_path, CASES["xid"][1])
    assert found.where.hosts == ("gpu07",)
    assert found.where.devices == ("0000:3b:00",)
    assert answer(tmp_path, CASES["ib"][1]).where.hosts == ("10.0.0.7",)


@pytest.mark.parametrize(
    ("line", "rank", "host"),
    [
        ("[rank3]:[E1118 02:10:00.1 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog", 3, None),
        ("[default5]:RuntimeError: CUDA error", 5, None),
        ("failed (exitcode: -9) local_rank: 3 (pid: 7) of binary: python", 3, None),
        ("node07: failed (exitcode: -9) local_rank: 3 (pid: 7) of binary", None, "node07"),
        ("worker-2: [2026-01-02 03:04:05,678] [ERROR] [launch.py:321:f] exits", None, "worker-2"),
        ("[1,3]<stderr>:gpu05:123:456 [3] NCCL WARN error", 3, "gpu05"),
        ("[3]<stderr>:RuntimeError", 3, None),
        ("12: RuntimeError: bad", 12, None),
        ("srun: error: gpu-a-05: tasks 3: Exited with exit code 1", 3, "gpu-a-05"),
        ("srun: error: Node failure on gpu05", None, "gpu05"),
        ("slurmctld: error: Nodes gpu05 not responding, setting DOWN", None, "gpu05"),
        ("[gpu05:12345] *** Process received signal ***", None, "gpu05"),
        ("[gpu05][[1234,1],3][btl_tcp_endpoint.c:626:x] recv(17) failed", 3, "gpu05"),
        ("process rank 3 with PID 12 on node gpu05 exited on signal 9 (Killed).", 3, "gpu05"),
        ("application called MPI_Abort(MPI_COMM_WORLD, 1) - process 3", 3, None),
        ("=   RANK 3 PID 1234 RUNNING AT gpu05", 3, "gpu05"),
        ("(RayTrainWorker pid=1234, ip=10.0.0.5) RuntimeError: x", None, "10.0.0.5"),
        ("node with node id: ab1 and address: 10.0.0.5 and node name: x dead", None, "10.0.0.5"),
        ("4a5b6c7d8e9f:123:456 [3] misc/socket.cc:50 NCCL WARN x", None, "4a5b6c7d8e9f"),
        ("gpu05:1:99 [Proxy Service 3] net.cc:1 NCCL WARN x", None, "gpu05"),
        ("03:04:05 [3] NCCL WARN x", None, None),
        ("[x.cc:12][1234]rank[3] remote rank[5] timeout", 3, None),
        ("call socket failed, host ip[10.0.0.8], localrank[1]", None, "10.0.0.8"),
        ("[Node rank 2] error: failed", None, None),
        ("max_lora_rank: 64 exceeds", None, None),
        ("expected a rank 3 tensor but got error", None, None),
        ("rank: -1 error", None, None),
        ("error in /job:jax_worker/replica:0/task:3: x", 3, None),
        ("Warning  NodeNotReady  Node gpu05 status is now: NodeNotReady", None, "gpu05"),
        ("Warning OOMKilling 2m kernel-monitor, gpu05 Memory cgroup", None, "gpu05"),
        ("[pod/trainer-worker-3/pytorch] RuntimeError: x", None, "trainer-worker-3"),
        ("gpu05: [12345.678] NVRM: Xid (PCI:0000:3b:00): 79", None, "gpu05"),
        ("update_node: node gpu05 reason set to: Kill task failed", None, "gpu05"),
        ("The node 'gpu05_1234_0' has failed to send a keep-alive heartbeat", None, "gpu05"),
        ('level=error node="gpu05" msg="Xid"', None, "gpu05"),
        ("[engine.py:100] error", None, None),
    ],
)
def test_launchers_say_who(line: str, rank: int | None, host: str | None) -> None:
    who = of_line(line, Identity())
    assert (who.rank, who.host) == (rank, host)


def test_a_launchers_command_says_whose_it_was() -> None:
    line = "['python', '-u', 'a.py', '--local_rank=3', '--x'] exits with return code = -9"
    assert of_line(cleaned(line), Identity()).rank == 3


def test_torchrun_names_the_rank_that_failed_first(tmp_path: Path) -> None:
    found = answer(
        tmp_path,
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026-01-02_03:04:05\n"
        "  host      : gpu187\n  rank      : 13 (local_rank: 5)\n  exitcode  : -9 (pid: 4242)\n",
    )
    assert found.component is Component.HOST
    assert found.where.ranks == (13,)
    assert found.where.hosts == ("gpu187",)


def test_the_silent_rank_is_where_to_look(tmp_path: Path) -> None:
    text = "".join(WATCHDOG.format(rank=r, number=9) for r in range(8) if r != 5)
    assert answer(tmp_path, text).where.ranks == (5,)


def test_the_rank_that_is_behind_is_where_to_look(tmp_path: Path) -> None:
    text = "".join(WATCHDOG.format(rank=r, number=8 if r == 2 else 9) for r in range(8))
    assert answer(tmp_path, text).where.ranks == (2,)


def test_nothing_wrong_is_healthy(tmp_path: Path) -> None:
    found = answer(tmp_path, "iteration 1 | lm loss 2.1\niteration 2 | lm loss 2.0\n")
    assert found.healthy
    assert found.exit_code == 0


def test_harmless_words_of_trouble_are_healthy(tmp_path: Path) -> None:
    found = answer(
        tmp_path,
        "  exit_on_missing_checkpoint ......... False\n  error_injection_rate ........ 0\n"
        "n1:1:1 [0] NCCL INFO NET/Plugin: libnccl-net.so: cannot open shared object file\n"
        "n1:1:1 [0] NCCL INFO NCCL_IB_TIMEOUT set by environment to 22.\n"
        "x.py:3: UserWarning: please pass use_reentrant explicitly\n"
        "[W socket.cpp:663] [c10d] The client socket has failed to connect to [localhost]:29500 "
        "(errno: 99 - Cannot assign requested address).\n"
        "iteration 7 | loss scale: 1.0 | number of nan iterations:   0 |\n"
        "kernel: pcieport 0000:3a:00.0: AER: Corrected error received: 0000:3b:00.0\n"
        "training done. exit code: 0\n",
    )
    assert found.healthy, found


def test_the_last_attempt_counts(tmp_path: Path) -> None:
    found = answer(
        tmp_path,
        "[rank0]: IndexError: list index out of range\n"
        "[default] Rendezvous complete for workers. Result: restart_count=1\n"
        "[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n",
    )
    assert found.component is Component.CHIP
    assert "2 attempts" in " ".join(found.notes)


@pytest.mark.parametrize(
    "shape",
    ["gzip", "colours", "carriage returns", "not utf-8", "cut off gzip", "utf-16", "crlf"],
)
def test_logs_as_they_lie_about(shape: str, tmp_path: Path) -> None:
    line = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    text = f"step 1\n{line}\nstep 2\n"
    packed = gzip.compress((text + "x\n" * 100_000).encode())
    raw = {
        "gzip": packed,
        "colours": line.replace("ECC", "\x1b[31mECC\x1b[0m").encode(),
        "carriage returns": f"1%\r2%\r3%{line}\r\n".encode(),
        "not utf-8": b"\xff\xfe\xfa\xe9 caf\xe9\n".replace(b"\xff\xfe", b"") + text.encode(),
        "cut off gzip": packed[:-12],
        "utf-16": text.encode("utf-16"),
        "crlf": text.replace("\n", "\r\n").encode(),
    }[shape]  # fmt: skip
    found = answer(tmp_path, raw)
    assert found.component is Component.CHIP
    assert "\x1b" not in found.evidence[0].text


def test_hosts_in_other_time_zones_are_put_in_order(tmp_path: Path) -> None:
    # the second host's clock shows eight hours more; its line is a minute older
    (tmp_path / "node1.log").write_text(
        "2026-01-02T03:05:00+00:00 node1 trainer[7]: IndexError: list index out of range\n"
    )
    (tmp_path / "node2.log").write_text(
        "2026-01-02T11:04:00+08:00 node2 trainer[7]: KeyError: 'optimizer'\n"
    )
    found = diagnose(collect([tmp_path], own_catalog()))
    assert [one.host for one in found.evidence] == ["node2", "node1"]


def test_code_in_a_line_is_shown_and_not_run(tmp_path: Path) -> None:
    line = "RuntimeError: <script>alert(1)</script> $(touch /tmp/x) `id` uncorrectable ECC error"
    assert answer(tmp_path, line).evidence[0].text == line


def test_empty_and_binary(tmp_path: Path) -> None:
    assert answer(tmp_path, "").cause == "the logs are empty"
    found = answer(tmp_path, bytes(range(256)) * 64)
    assert found.component is Component.UNDETERMINED
    assert "not text" in found.notes[0]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text("x")
    with pytest.raises(InputError, match=r"did you mean 'rank_0\.log'"):
        collect([tmp_path / "rank_0.lgo"], own_catalog())


def test_files_say_whose_they_are(tmp_path: Path) -> None:
    for rank in range(4):
        text = (
            "OSError: [Errno 5] Input/output error\n"
            if rank == 2
            else WATCHDOG.format(rank=rank, number=2)
        )
        (tmp_path / f"rank_{rank}.log").write_text(text)
    found = diagnose(collect([tmp_path], own_catalog()))
    assert (found.component, found.where.ranks) == (Component.STORAGE, (2,))


def test_both_ways_of_searching_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(["error", "he", "she", "hers", "no space"])
    block = b"ushers\nnothing\nERROR here\nNo Space\n\nthe end" * 50
    slow = gate.positions(block, whole_bytes=0)
    fast = gate.positions(block, whole_bytes=gates.SMALL_BYTES)

    def lines(found: list[int]) -> list[int]:
        return [block.count(b"\n", 0, at) for at in found]

    assert lines(slow) == lines(fast)
    assert lines(slow)[:4] == [0, 2, 3, 5]


def test_templates_find_what_one_host_says() -> None:
    tree = TemplateTree()
    for host in ("a", "b", "c"):
        for step in range(5):
            tree.add(f"step {step} took 12 ms", file="x", line=step, host=host)
    tree.add("flux capacitor over budget", file="x", line=9, host="b")
    assert [t.text() for t in tree.said_by_one()] == ["flux capacitor over budget"]
    assert len(tree.templates()) == 2


def test_own_signatures_go_first_and_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        "- name: flux\n  layer: chip\n  component: chip\n  specificity: 0.9\n"
        "  says: the flux fails\n  any: ['flux capacitor error']\n  remedy: replace it\n"
        "  examples: ['flux capacitor error: 3']\n"
    )
    (tmp_path / "job.log").write_text("flux capacitor error: 7\n")
    found = diagnose(collect([tmp_path / "job.log"], with_own_signatures(own_catalog(), path)))
    assert (found.component, found.cause) == (Component.CHIP, "the flux fails")
    path.write_text(path.read_text().replace("error: 3", "fine"))
    with pytest.raises(InputError, match="does not match its example"):
        with_own_signatures(own_catalog(), path)


def test_every_cause_has_a_remedy_a_component_and_a_source() -> None:
    catalog = own_catalog()
    assert len(catalog.signatures) > 100
    for one in catalog.signatures:
        assert one.source, one.name
        if one.kind == "cause" and not one.table:
            assert one.remedy, one.name
            assert one.component is not Component.UNDETERMINED, one.name


def test_a_fault_in_a_log_that_is_trouble_throughout_is_told(tmp_path: Path) -> None:
    shapes = [
        "n{0}:{1}:{1} [{0}] NCCL WARN NET/Socket : peer 10.0.0.{0}<{1}> failed: Connection reset\n",
        "[rank{0}] WARNING: gave up on shard {1} after {0} retries\n",
        "an error of kind x{1:x}y in {1:o}z\n",
    ]
    flood = [shapes[i % 3].format(i % 16, i) for i in range(60_000)]
    flood.insert(50_000, "[rank7]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n")
    text = "".join(flood)
    assert len(text) > gates.SMALL_BYTES
    found = answer(tmp_path, text)
    assert (found.component, found.where.ranks) == (Component.CHIP, (7,))
    assert found.evidence[0].line == 50_001
    assert not any("not looked at" in note for note in found.notes)


def test_who_reads_a_flood_of_like_lines_is_told_that_not_all_were_looked_at(
    tmp_path: Path,
) -> None:
    line = "[rank{}]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    found = answer(tmp_path, "".join(line.format(i % 16) for i in range(40_000)))
    assert found.component is Component.CHIP
    assert [note for note in found.notes if "not looked at" in note] == [
        "7,218 lines like tens of thousands before them were not looked at"
    ]


def test_lines_of_one_shape_are_thinned_and_others_are_not() -> None:
    gate = Gate(["error"], ["cuda error"])
    block = b"".join(b"cuda error %d\n" % i for i in range(200_000))
    passed = gate.positions(block, whole_bytes=len(block))
    assert 32_768 <= len(passed) < 34_000
    assert gate.thinned == 200_000 - len(passed)
    unknown = b"".join(b"error %d\n" % i for i in range(200_000))
    assert len(gate.positions(unknown, whole_bytes=len(unknown))) == 64
    assert len(gate.positions(b"a new cuda error\n" * 5, whole_bytes=len(block))) == 5
    everything = Gate(["error"])
    assert len(everything.positions(unknown, whole_bytes=len(unknown))) > 32_000
