"""`tutti chips` and `tutti cluster` as a user types them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tutti.cli.main import run
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.hardware.library import shipped_cluster_names


def tutti(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        run(arguments)
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_chips_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = tutti(capsys, "chips")
    assert code == 0
    for name in ("A800", "Kunlun-P800", "Ascend-910B2C", "GB300", "nominal", "partly assumed"):
        assert name in out


def test_one_chip_with_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = tutti(capsys, "chips", "a100_80gb")
    assert code == 0
    assert "312 TFLOP/s" in out
    assert "NVIDIA A100 data sheet" in out


def test_chips_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    chips = json.loads(tutti(capsys, "chips", "--json")[1])
    assert {chip["name"] for chip in chips} >= {"V100-16", "MI300X", "CPU"}
    one = json.loads(tutti(capsys, "chips", "H20", "--json")[1])
    assert (one["peak"]["bf16"], one["basis"], one["measured"]) == (148e12, "nominal", False)


def test_node_types(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = tutti(capsys, "chips", "--nodes")
    assert code == 0
    said = " ".join(out.split())
    assert "HGX-A800 8 × A800 NVLink of 8:" in said
    assert "8 × 200 Gb/s" in said
    assert "18 × 144" in said  # the hosts of a rack
    _, out, _ = tutti(capsys, "chips", "a800", "--nodes", "--json")
    (node,) = json.loads(out)
    assert (node["name"], node["chip"], node["num_chips"]) == ("HGX-A800", "A800", 8)
    assert node["islands"][0]["bandwidth"] == 200e9
    assert node["host"]["memory_bytes"] == 2 * 2**40


def test_a_shell_completes_verbs_and_options(tmp_path: Path) -> None:
    def completed(line: str) -> list[str]:
        words = line.split(" ")
        asked = {
            "_TUTTI_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
        }
        script = "import sys; sys.argv[0] = 'tutti'; from tutti.cli.main import run; run()"
        command = [sys.executable, "-c", script]
        found = subprocess.run(
            command, env={**os.environ, **asked, "HOME": str(tmp_path)}, timeout=120, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        return found.stdout.split()

    assert "plan" in completed("tutti pl")
    assert "--exportable" in completed("tutti plan --exp")


@pytest.mark.parametrize("name", shipped_cluster_names())
def test_every_example_is_drawn(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, _ = tutti(capsys, "cluster", "show", name)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 120
    assert len(out.splitlines()) < 90
    for pool in Cluster.load(name).pools:
        assert f"{pool.name} · {pool.num_chips:,} × {pool.chip.name}" in out


def test_cluster_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    written = json.loads(tutti(capsys, "cluster", "show", "H16384", "--json")[1])
    assert written.pop("totals")["chips"] == 16384
    assert written.pop("notes") == []
    assert Cluster.from_document(written, Place("x")) == Cluster.load("H16384")


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = tutti(capsys, "cluster", "show", "--here")
    assert code == 0
    assert "note: " in out
    written = json.loads(tutti(capsys, "cluster", "show", "--here", "--json")[1])
    assert written["totals"]["chips"] >= 1


def test_this_machine_as_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    assert tutti(capsys, "cluster", "show", "--here", "-o", str(path))[0] == 0
    assert tutti(capsys, "cluster", "show", str(path))[0] == 0
    code, _, err = tutti(capsys, "cluster", "show", "E100", "-o", str(tmp_path / "x.toml"))
    assert (code, (tmp_path / "x.toml").exists()) == (2, False)
    assert "a cluster file ends in .yaml or .json" in err
    code, _, err = tutti(capsys, "cluster", "show", "E100", "-o", str(tmp_path / "no/x.yaml"))
    assert code == 2
    assert "cannot be written" in err


def test_the_examples_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = tutti(capsys, "cluster", "list")
    assert code == 0
    assert all(name in out for name in shipped_cluster_names())
    assert len(json.loads(tutti(capsys, "cluster", "list", "--json")[1])) == len(
        shipped_cluster_names()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chips", "A801"], "tutti: chips: 'chip' is 'A801'; did you mean 'A800'?"),
        (["cluster", "show", "E10"], "tutti: no cluster 'E10'"),
        (["cluster", "show"], "or else --here"),
        (["cluster", "show", "E100", "--here"], "or else --here"),
        (["cluster", "show", "no/such.yaml"], "no/such.yaml: no such file"),
        (["comm", "explain", "small-mixed", "--nodes", "99"], "its largest pool has 2 nodes"),
    ],
)
def test_errors_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = tutti(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_a_bad_file_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("name: x\npools: [{name: a800, chip: A801}]\n")
    code, _, err = tutti(capsys, "cluster", "show", str(path))
    assert code == 2
    assert err == "tutti: cluster.yaml: pool 'a800': 'chip' is 'A801'; did you mean 'A800'?\n"


def test_no_torch_is_imported() -> None:
    program = (
        "import sys\n"
        "from tutti.cli.main import run\n"
        "try:\n    run(['cluster', 'show', 'E100', '--json'])\n"
        "except SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
