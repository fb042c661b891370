"""Cluster files: examples load, round trips are exact, bad input is one line."""

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.draws import examples
from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.library import shipped, shipped_cluster, shipped_cluster_names

HERE = Place("c.yaml")
EXAMPLES = shipped_cluster_names()

CHIPS_OF = {
    "S16": {"A800": 8, "V100-32": 8},
    "S32": {"A800": 16, "V100-32": 16},
    "S64": {"A800": 32, "V100-32": 32},
    "S128": {"A800": 64, "V100-32": 64},
    "E100": {"A800": 64, "Kunlun-P800": 64},
    "E1000": {"A800": 512, "Ascend-910B2C": 512},
    "E1536": {"A800": 512, "Kunlun-P800": 512, "Ascend-910B2C": 512},
    "B1024": {"A800": 512, "Kunlun-P800": 256, "Ascend-910B2C": 256},
    "H16384": {"A800": 8192, "Kunlun-P800": 4096, "Ascend-910B2C": 4096},
    "OPT-8": {"A100-40-opt": 8, "V100-16-opt": 8},
    "OPT-64": {"A100-40-opt": 64, "V100-16-opt": 64},
}


@pytest.mark.parametrize("name", CHIPS_OF)
def test_the_planner_table(name: str) -> None:
    cluster = Cluster.load(name)
    assert {pool.chip.name: pool.num_chips for pool in cluster.pools} == CHIPS_OF[name]
    for pool in cluster.pools:
        assert pool.node.num_chips == (16 if "Ascend" in pool.chip.name else 8)
        if not name.startswith("OPT"):
            assert {pool.node.nic_rate(s) for s in range(pool.node.num_chips)} == {25e9}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_load_and_survive_a_round_trip(name: str) -> None:
    cluster = Cluster.load(name)
    assert cluster.name == name
    assert cluster.summary
    for embed in (False, True):
        written = json.loads(json.dumps(cluster.to_document(embed=embed)))
        assert Cluster.from_document(written, HERE) == cluster
        assert Cluster.from_document(written, HERE).fingerprint() == cluster.fingerprint()
    assert cluster.memory_bytes > 0


@pytest.mark.parametrize("node", shipped().nodes.values(), ids=lambda node: node.name)
def test_node_types_are_sane(node: Any) -> None:
    assert node.source
    assert sum(len(group) for group in node.islands_or_singles) == node.num_chips
    assert node.all_reach_a_nic
    for nic in node.nics:
        assert 0 <= node.nic_numa(nic) < node.host.numa_nodes


def test_every_chip_that_ships_has_a_node() -> None:
    held = {node.chip.name for node in shipped().nodes.values()}
    # Packages of two dies are described, but a process drives a die.
    assert set(shipped().chips) - held == {"MI250X", "Ascend-910C"}


def test_a_small_file_is_small() -> None:
    written = {"name": "x", "pools": [{"name": "a", "chip": "A800"}]}
    document = Cluster.from_document(written, HERE).to_document()
    assert document == {"name": "x", "pools": [{"name": "a", "node": "HGX-A800"}]}


def test_totals() -> None:
    cluster = Cluster.load("S16")
    assert cluster.num_chips == 16
    assert cluster.peak_flops(Dtype.BF16, fallback=True) == 8 * (312e12 + 125e12)
    with pytest.raises(InputError, match="no bf16"):
        cluster.peak_flops(Dtype.BF16)
    assert cluster.watts == 8 * 400 + 8 * 300
    assert cluster.price_per_hour is None
    leftovers = Cluster.load("leftovers")
    assert leftovers.price_per_hour == pytest.approx(31 * 1.6 + 40 * 0.8 + 12 * 0.5)
    assert leftovers.pool("l40s").chip_watts == 320


def test_an_unknown_pool_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'a800'"):
        Cluster.load("E100").pool("a80")


def test_definitions_with_a_base() -> None:
    cluster = Cluster.from_document(
        {
            "name": "x",
            "chips": [{"name": "A100-90", "base": "A100-80", "memory_bytes": "90 GiB"}],
            "nodes": [
                {"name": "six", "base": "HGX-A100-80", "chip": "A100-90", "num_chips": 6},
                {"name": "bare", "base": "six", "islands": None, "host": {"cores": 3}},
            ],
            "pools": [{"name": "a", "node": "six", "nodes": 3}, {"name": "b", "node": "bare"}],
        },
        HERE,
    )
    six, bare = cluster.pool("a").node, cluster.pool("b").node
    assert six.chip.memory_bytes == 90 * 2**30
    assert six.chip.peak_flops(Dtype.BF16) == 312e12
    assert six.chip.aliases == ()
    assert [str(island.slots) for island in six.islands] == ["0-5"]
    assert len(six.nics) == 6
    assert bare.islands == ()
    assert (bare.host.cores, bare.host.memory_bytes) == (3, six.host.memory_bytes)
    assert Cluster.from_document(cluster.to_document(), HERE) == cluster


def test_a_redefined_chip_is_used_by_nodes_that_ship() -> None:
    chips = [{"name": "A800", "base": "A800", "memory_bytes": "40 GiB"}]
    written = {"name": "x", "chips": chips, "pools": [{"name": "a", "node": "HGX-A800"}]}
    cluster = Cluster.from_document(written, HERE)
    assert cluster.pools[0].chip.memory_bytes == 40 * 2**30
    assert Cluster.from_document(cluster.to_document(), HERE) == cluster


# --- bad input -----------------------------------------------------------------------------------

POOL = {"name": "a", "node": "HGX-A800", "nodes": 2}


def one(**change: object) -> dict[str, object]:
    return {"name": "x", "pools": [POOL | change]}


def two(**link: object) -> dict[str, object]:
    other = {"name": "b", "node": "OAM-8xP800"}
    return {
        "name": "x",
        "pools": [POOL, other],
        "fabric": {"links": [{"pools": ["a", "b"]} | link]},
    }


APART = {
    "name": "apart",
    "nodes": [
        {"name": name, "chip": chip, "num_chips": 1, "host": {
            "cores": 12, "memory_bytes": "85 GiB", "memory_bandwidth": "80 GB/s",
            "device_bandwidth": "12 GB/s"}}
        for name, chip in (("a", "A100-40"), ("b", "L4"))
    ],
    "pools": [{"name": "one", "node": "a", "nodes": 1}, {"name": "two", "node": "b", "nodes": 1}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "c.yaml: is empty"),
        ([], "expected a mapping"),
        ("text", "expected a mapping"),
        ({"name": "x"}, "'pools' is missing"),
        ({"name": "x", "pools": []}, "'pools' is empty"),
        ({"name": "x", "pools": {}}, "expected a list"),
        ({"name": "x", "pools": ["a"]}, "expected a mapping"),
        ({"name": "x y", "pools": [POOL]}, "letters, digits"),
        ({"name": "x", "pool": [POOL]}, "did you mean 'pools'"),
        ({"name": "x", "chip": [], "pools": [POOL]}, "did you mean 'chips'"),
        ({"name": "x", "pools": [POOL, POOL]}, "two pools are called 'a'"),
        ({"name": "x", "chips": {}, "pools": [POOL]}, "'chips' is {}; expected a list"),
        (one(chip="A800"), "pool 'a': give 'node' or 'chip', not both"),
        ({"name": "x", "pools": [{"name": "a"}]}, "pool 'a': 'node' is missing"),
        ({"name": "x", "pools": [{"name": "a", "chip": "A801"}]},
         "c.yaml: pool 'a': 'chip' is 'A801'; did you mean 'A800'?"),
        (one(node="HGX-A8000"), "did you mean 'HGX-A800'"),
        (one(node=["HGX-A800"]), "expected the name of a node type"),
        (one(nodes=0), "must be at least 1"),
        (one(nodes=-3), "must be at least 1"),
        (one(nodes=1.5), "expected a whole number"),
        (one(nodes=True), "expected a whole number"),
        (one(nodes=10**400), "must be at most 1e+06"),
        (one(chips_per_node=9), "has 8; define a larger one"),
        (one(chips_per_node="8"), "expected a whole number"),
        (one(price_per_chip_hour=float("nan")), "not a finite number"),
        (one(price_per_chip_hour=-1), "must be at least 0"),
        (one(watts="400 V"), "unknown unit 'V'"),
        (one(chips_per_nod=1), "unknown key 'chips_per_nod'; did you mean 'chips_per_node'?"),
        (two(kind="hostforwarded"), "did you mean 'host_forwarded'"),
        (two(pools=["a", "c"]), "a link names pool 'c'"),
        (two(pools=["a", "a"]), "names 'a' twice"),
        (two(pools=["a"]), "expected a list of 2"),
        (two(nic_fraction=1.5), "must be at most 1"),
        (two(nic_fraction=0.5, bandwidth="1 GB/s"), "not both"),
        (two(same_host=True), "'same_host' needs 'bandwidth'"),
        (one() | {"fabric": {"tiers": []}}, "'tiers' is empty"),
        (one() | {"fabric": {"tiers": [{"name": "leaf"}, {"name": "spine"}]}}, "lacks 'nodes'"),
        (one() | {"fabric": {"tiers": [{"name": "a", "nodes": 8}, {"name": "b", "nodes": 4}]}},
         "from the leaf upwards"),
        (one() | {"fabric": {"tiers": [{"name": "a", "oversubscription": 0.5}]}}, "at least 1"),
        (one() | {"fabric": {"tires": []}}, "did you mean 'tiers'"),
        (APART, "'one' and 'two' cannot meet: pool 'one' has chips without a NIC; add 'nics', or"),
    ],
)  # fmt: skip
def test_bad_files_are_one_line(document: object, message: str) -> None:
    with pytest.raises(InputError) as caught:
        Cluster.from_document(document, HERE)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def node(**change: object) -> dict[str, object]:
    good = {"name": "n", "chip": "A800", "num_chips": 4, "nics": {"rate": "100 Gb/s"}}
    return {"name": "x", "nodes": [good | change], "pools": [{"name": "a", "node": "n"}]}


ISLAND = {"kind": "NVLink", "slots": "0-3", "bandwidth": "200 GB/s"}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (node(chip="A80"), "node 'n': 'chip' is 'A80'; did you mean 'A800'?"),
        (node(num_chips=0), "must be at least 1"),
        (node(num_chips=100000), "must be at most 4096"),
        (node(islands=[ISLAND | {"slots": "0-7"}]), "names slot 4, but the node has 4 chips"),
        (node(islands=[ISLAND, ISLAND]), "slot 0 is in two islands"),
        (node(islands=[ISLAND | {"slots": "3-0"}]), "3 comes after 0"),
        (node(islands=[ISLAND | {"slots": "0-99999999999"}]), "at most 4096"),
        (node(islands=[ISLAND | {"slots": "all"}]), "write slots like '0-7'"),
        (node(islands=[ISLAND | {"slots": [0, 0]}]), "names a slot twice"),
        (node(islands=[ISLAND | {"slots": []}]), "names no slots"),
        (node(islands=[ISLAND | {"pair_bandwidth": "300 GB/s"}]), "exceeds 'bandwidth'"),
        (node(nics=[{"rate": 0}]), "must be more than 0"),
        (node(nics=[{"rate": 1e9, "numa": 2}]), "NUMA node 2"),
        (node(nics={"rate": 1e9, "per_chip": 0}), "'per_chip' is 0"),
        (node(hosts=3), "do not divide over 3 hosts"),
        (node(base="HGX-A80"), "'base' is 'HGX-A80'; did you mean 'HGX-A800'?"),
        (
            node() | {"nodes": [{"name": "n", "base": "HGX-A800", "name2": 1}]},
            "unknown key 'name2'",
        ),
        (node() | {"nodes": [{"base": "HGX-A800"}]}, "needs a 'name'"),
        (node() | {"nodes": [{"name": "n", "base": "HGX-A800"}] * 2}, "defined twice"),
        (node() | {"nodes": ["n"]}, "expected a mapping"),
        (node(nics=[]) | {"pools": [{"name": "a", "node": "n", "nodes": 2}]}, "reach no NIC"),
    ],
)
def test_bad_nodes_are_one_line(document: object, message: str) -> None:
    with pytest.raises(InputError) as caught:
        Cluster.from_document(document, HERE)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\xff\xfe\x00\x01", "not a text file"),
        (b"\x00\x01\x02", "not valid YAML"),
        (b"name: x\nname: y\n", "the key 'name' stands twice"),
        (b"name: [x\n", "line 2"),
        (b"name: x\npools: [{name: a, node: HGX-A800, nodes: .nan}]\n", "'nodes' is NaN"),
        (b"- 1\n- 2\n", "expected a mapping"),
        (b"? {a: b}\n: 1\n", "a key must be plain text"),
    ],
)
def test_files_that_are_not_what_they_should_be(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        Cluster.load(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(("c.yaml: ", str(path)))
    assert "\n" not in str(caught.value)


def test_loading_by_path_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(Cluster.load("leftovers").to_document()))
    assert Cluster.load(path) == Cluster.load("leftovers")
    assert Cluster.load("LEFTOVERS").name == "leftovers"
    monkeypatch.chdir(tmp_path)
    assert Cluster.load("mine.json").name == "leftovers"
    with pytest.raises(InputError, match="did you mean 'E100'"):
        Cluster.load("E101")
    with pytest.raises(InputError, match=r"did you mean 'mine.json'"):
        Cluster.load(tmp_path / "mime.json")
    with pytest.raises(InputError, match="is a folder"):
        Cluster.load(f"{tmp_path}/")


@pytest.mark.parametrize("ending", ["yaml", "json"])
@pytest.mark.parametrize("name", ["leftovers", "laptop", "H16384"])
def test_saving_and_loading(tmp_path: Path, name: str, ending: str) -> None:
    path = tmp_path / f"c.{ending}"
    Cluster.load(name).save(path)
    assert Cluster.load(path) == Cluster.load(name)


# --- mutations -----------------------------------------------------------------------------------

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.sampled_from([10**30, -1e300, 1e308, float("nan"), float("inf"), 0.0, 1e-320]),
    st.sampled_from(["", "0-3", "A800", "7 GB/s", "1 us", "a", "nan", "[red]", "x\ny", "é"]),
    st.sampled_from(["1e999 GB", "9" * 400, "\0", "[/]", "0-9,1-2", "１"]),
    st.just([]),
    st.just({}),
    st.just([{}]),
    st.just({"name": "A800"}),
)  # fmt: skip


def places(value: Any, trail: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All ways into a document."""
    found = [trail] if trail else []
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(item, (*trail, key))
    return found


def _parent(document: Any, trail: tuple[Any, ...]) -> Any:
    for key in trail[:-1]:
        document = document[key]
    return document


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    name = draw(st.sampled_from(["leftovers", "laptop", "E1536", "oversubscribed"]))
    embed = draw(st.booleans())
    raw = Cluster.load(name).to_document(embed=True) if embed else shipped_cluster(name)
    document = copy.deepcopy(raw)
    for _ in range(draw(st.integers(1, 3))):
        trails = places(document)
        if not trails:
            break
        trail = draw(st.sampled_from(trails))
        parent, key = _parent(document, trail), trail[-1]
        match draw(st.sampled_from(["replace", "remove", "rename", "double"])):
            case "replace":
                parent[key] = copy.deepcopy(draw(JUNK))  # st.just hands out one object
            case "remove":
                del parent[key]
            case "rename" if isinstance(parent, dict):
                parent[draw(st.sampled_from(["nam", "links", "slots", "x", "base"]))] = parent.pop(
                    key
                )
            case "double" if isinstance(parent, list):
                parent.append(copy.deepcopy(parent[key]))
    return document


@settings(
    max_examples=examples(300, 100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(mutated())
def test_mutated_files_are_refused_in_one_line_or_valid(document: Any) -> None:
    from rich.console import Console

    from tutti.hardware.drawing import draw_cluster

    refused, cluster = "", None
    try:
        cluster = Cluster.from_document(document, HERE)
    except InputError as error:
        refused = str(error)
    if cluster is None:
        assert refused.startswith("c.yaml: ")
        assert "\n" not in refused
        return
    assert Cluster.from_document(cluster.to_document(), HERE) == cluster
    console = Console(width=100, file=io.StringIO())
    console.print(draw_cluster(cluster))
