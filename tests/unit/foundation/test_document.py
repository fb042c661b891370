"""Strict documents: what is written comes back, what is wrong is named in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.document import AtMost, Bytes, Count, Place, build, plain
from tutti.errors import InputError
from tutti.files import fingerprint, parse_json, parse_yaml, pretty_json, read_file, write_text


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    name: str
    size: Bytes = 0.0
    colour: Colour = Colour.RED


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    leaves: tuple[Leaf, ...]
    count: Count = 1
    share: Annotated[float, AtMost(1)] | None = None
    kind: Literal["oak", "ash"] = "oak"
    pair: tuple[int, int] = (0, 0)
    notes: Mapping[str, int] = field(default_factory=dict)
    flag: bool = False


PLACE = Place("tree.yaml")


def read(text: str) -> Tree:
    return build(Tree, parse_yaml(text, "tree.yaml"), PLACE)


def test_units_defaults_and_nesting():
    tree = read("leaves: [{name: a, size: 2 GiB, colour: green}]\npair: [1, 2]\nshare: 0.5")
    assert tree == Tree(
        leaves=(Leaf(name="a", size=2.0**31, colour=Colour.GREEN),), pair=(1, 2), share=0.5
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "tree.yaml: expected a mapping of keys to values, found null"),
        ("[1]", "tree.yaml: expected a mapping of keys to values, found [1]"),
        ("leafs: []", "tree.yaml: unknown key 'leafs'; did you mean 'leaves'?"),
        ("count: 2", "tree.yaml: 'leaves' is missing"),
        ("leaves: 3", "tree.yaml: 'leaves' is 3; expected a list"),
        ("leaves: [{}]", "tree.yaml: leaves[0]: 'name' is missing"),
        (
            "leaves: [{name: a, colour: gren}]",
            "tree.yaml: leave 'a': 'colour' is 'gren'; did you mean 'green'?",
        ),
        (
            "leaves: [{name: a, size: 2 GiBs}]",
            "tree.yaml: leave 'a': 'size' is '2 GiBs': unknown unit 'GiBs'; did you mean 'GiB'?",
        ),
        (
            "leaves: [{name: a, size: -1}]",
            "tree.yaml: leave 'a': 'size' is -1; must be at least 0",
        ),
        (
            "leaves: [{name: a, size: .nan}]",
            "tree.yaml: leave 'a': 'size' is nan, which is not a finite number",
        ),
        ("leaves: []\ncount: 0", "tree.yaml: 'count' is 0; must be at least 1"),
        ("leaves: []\ncount: 1.5", "tree.yaml: 'count' is 1.5; expected a whole number"),
        ("leaves: []\ncount: true", "tree.yaml: 'count' is true; expected a whole number"),
        ("leaves: []\nshare: 2", "tree.yaml: 'share' is 2; must be at most 1"),
        ("leaves: []\nkind: elm", "tree.yaml: 'kind' is 'elm'; known: ash, oak"),
        ("leaves: []\npair: [1]", "tree.yaml: 'pair' is [1]; expected a list of 2"),
        ("leaves: []\nnotes: {a: x}", "tree.yaml: notes: 'a' is 'x'; expected a whole number"),
        ("leaves: []\nflag: 1", "tree.yaml: 'flag' is 1; expected true or false"),
        ("leaves: []\nleaves: []", "tree.yaml: line 2: the key 'leaves' stands twice"),
        ("leaves: [", "tree.yaml: line 1: "),
        ("1: 2", "tree.yaml: the key 1 must be text; quote it"),
    ],
)
def test_errors_name_place_value_and_remedy(text, message):
    with pytest.raises(InputError) as caught:
        read(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


leaves = st.builds(
    Leaf,
    name=st.text(st.characters(codec="utf-8"), max_size=8),
    size=st.floats(0, 1e18),
    colour=st.sampled_from(Colour),
)
trees = st.builds(
    Tree,
    leaves=st.lists(leaves, max_size=4).map(tuple),
    count=st.integers(1, 10**12),
    share=st.none() | st.floats(-1e6, 1),
    kind=st.sampled_from(["oak", "ash"]),
    pair=st.tuples(st.integers(), st.integers()),
    notes=st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
    flag=st.booleans(),
)


@given(trees)
def test_written_documents_read_back_exactly(tree):
    text = pretty_json(plain(tree))
    assert build(Tree, parse_json(text, "x"), PLACE) == tree


def refusal(read) -> str | None:
    """Return the message of an InputError; any other exception is a failure."""
    try:
        read()
    except InputError as error:
        return str(error)
    return None


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["leaves", "name", "size", "count", "kind", "notes"])
            | st.text(max_size=4),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(values)
def test_any_value_is_read_or_refused_in_one_line(value):
    said = refusal(lambda: build(Tree, value, PLACE))
    assert said is None or (said.startswith("tree.yaml: ") and "\n" not in said)


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text):
    for parse in (parse_yaml, parse_json):
        said = refusal(lambda parse=parse: parse(text, "f"))
        assert said is None or (said.startswith("f: ") and "\n" not in said)


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": Infinity}', '{"a": 1, "a": 2}', "{", ""])
def test_json_that_is_not_json(text):
    with pytest.raises(InputError):
        parse_json(text, "f.json")


@given(values)
def test_pretty_json_is_the_same_json(value):
    import json

    assert json.loads(pretty_json(value)) == json.loads(json.dumps(value)) or value != value


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "cluster.yaml").write_text("a: 1")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, said in [
        ("clutser.yaml", "no such file; did you mean 'cluster.yaml'?"),
        ("", "is a folder; name a file"),
        ("binary.yaml", "not a text file"),
    ]:
        with pytest.raises(InputError, match=said.replace("?", r"\?")):
            read_file(tmp_path / name)


def test_a_missing_file_is_not_answered_by_what_has_nothing_to_do_with_it(tmp_path):
    (tmp_path / "pm").mkdir()
    (tmp_path / "notes.txt").write_text("")

    def said() -> str:
        with pytest.raises(InputError) as refused:
            read_file(tmp_path / "room.yml")
        return str(refused.value).rpartition("/")[2]

    assert said() == "room.yml: no such file"
    (tmp_path / "lab.yml").write_text("a: 1")
    assert said() == "room.yml: no such file; known: lab.yml"
    (tmp_path / "rooms.yml").mkdir()  # a folder cannot have been meant
    assert said() == "room.yml: no such file; known: lab.yml"
    (tmp_path / "room.yaml").write_text("a: 1")
    assert said() == "room.yml: no such file; did you mean 'room.yaml'?"


def test_what_may_not_be_written(tmp_path, monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tutti.files.tempfile.mkstemp", refuse)
    with pytest.raises(InputError, match=r"cannot write .*x\.json: permission denied"):
        write_text(tmp_path / "x.json", "x")


def test_writing_is_all_or_nothing(tmp_path):
    target = tmp_path / "plan.json"
    write_text(target, "old")

    with pytest.raises(InputError, match="cannot be written"):
        write_text(tmp_path / "no" / "such" / "folder.json", "x")
    with pytest.raises(UnicodeEncodeError):
        write_text(target, "half \ud800")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_fingerprints_ignore_key_order():
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


def test_devices_and_links_are_written_to_not_replaced(tmp_path):
    import os

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    write_text(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
