"""Checkpoints under a URL: sent, named, found again; what goes wrong there is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.any_plan import FOUR, PLAIN, Draft, level
from tests.support.checkpointing import Run, kept, run
from tutti.errors import DamagedError, InputError
from tutti.plan.plan import Plan
from tutti.storage import url as urls
from tutti.storage.url import RemoteError, RemoteFolder
from tutti.train.checkpoint import CheckpointSettings, find_latest
from tutti.train.checkpoint.remote import INDEX, RemoteRun, shares
from tutti.train.checkpoint.sharing import ChunkRead, hand_out


@pytest.fixture(autouse=True)
def quick(monkeypatch: Any) -> None:
    monkeypatch.setattr(urls, "_PAUSE_S", 0.001)


def plan_of(ranks: int = 2) -> Plan:
    return Draft().line((FOUR, [{"count": ranks}])).plan(PLAIN, level(1))


def saving(url: str, **words: Any) -> CheckpointSettings:
    return CheckpointSettings(asynchronous=False, to=url, **{"keep_last": 2, **words})


def steps(url: str) -> list[int]:
    return [found.step for found in RemoteRun(url).newest_first()]


def save_steps(one: Run, count: int) -> None:
    for _ in range(count):
        one.train(1)
        one.save()


def test_a_run_goes_on_from_its_url_alone_under_another_plan(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    states: list[Any] = []

    def work(one: Run) -> None:
        one.begin()
        save_steps(one, 3)
        states.append(kept(one.engine))

    run(plan_of(2), tmp_path / "one", work, settings=saving(url))
    assert steps(url) == [3, 2]
    names = {path.name.partition(".")[0] for path in (tmp_path / "store").iterdir()}
    assert names == {"checkpoints", "step-000002", "step-000003"}

    def again(one: Run) -> None:
        assert one.checkpointer.load(one.engine).step == 3
        for (key, _, value), (other, _, before) in zip(
            kept(one.engine), sorted_states, strict=True
        ):
            assert key == other
            assert torch.equal(value, before), key
        one.train(1)
        one.save()

    sorted_states = _whole(states)
    run(plan_of(1), tmp_path / "two", again, settings=saving(url))
    assert steps(url) == [4, 3]
    found = find_latest(tmp_path / "two")
    assert found is not None
    assert found.name == "step-000004"


def _whole(states: list[Any]) -> list[Any]:
    """Join what two ranks keep of each tensor, in the order of one rank that keeps all of it."""
    spec = plan_of(1).model.spec
    assert spec is not None
    from tests.support.checkpointing import whole

    found = whole(spec, states)
    order: list[Any] = []

    def collect(one: Run) -> None:
        one.begin()
        order.extend((key, slices) for key, slices, _ in kept(one.engine))

    from tests.support.threads import World

    World(1).run(lambda links: collect(Run(links, plan_of(1), Path("/nonexistent"))))
    return [(key, slices, found[key][slices]) for key, slices in order]


def test_what_fails_on_the_way_is_not_named_and_is_sent_later(
    tmp_path: Path, monkeypatch: Any
) -> None:
    url = f"memory://{tmp_path.name}"
    real = RemoteFolder.upload

    def fails(self: RemoteFolder, source: Path, name: str) -> int:
        if "__1_0" in name and "step-000002" in name:
            raise RemoteError(f"{name}: the line is cut")
        return real(self, source, name)

    def work(one: Run) -> None:
        one.begin()
        save_steps(one, 1)
        monkeypatch.setattr(RemoteFolder, "upload", fails)
        save_steps(one, 1)
        last = one.checkpointer.history[-1].problem
        assert "it is in" in last
        assert "rank 1:" in last
        assert "the line is cut" in last
        assert steps(url) == [1]

    run(plan_of(), tmp_path / "run", work, settings=saving(url))
    found = find_latest(tmp_path / "run")
    assert found is not None
    assert found.name == "step-000002"
    monkeypatch.setattr(RemoteFolder, "upload", real)

    def later(one: Run) -> None:
        one.checkpointer.catch_up()
        one.checkpointer.wait()

    run(plan_of(), tmp_path / "run", later, settings=saving(url))
    assert steps(url) == [2, 1]


def test_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"

    def work(one: Run) -> None:
        one.begin()
        save_steps(one, 2)

    run(plan_of(1), tmp_path / "one", work, settings=saving(url))
    newest = RemoteRun(url).newest_first()[0]
    torn = tmp_path / "store" / newest.folder / "__0_0.distcp"
    torn.write_bytes(torn.read_bytes()[:-100])
    lines: list[str] = []

    def again(one: Run) -> None:
        assert one.checkpointer.load(one.engine).step == 1
        lines.extend(one.lines)

    run(plan_of(1), tmp_path / "two", again, settings=saving(url))
    assert "step-000002 is not used" in lines[0]
    assert "bytes, found" in lines[0]
    # every number is held against its checksum, also where the size is right
    torn.write_bytes(b"\0" * (torn.stat().st_size + 100))
    run(plan_of(1), tmp_path / "three", again, settings=saving(url))


def test_a_checkpoint_is_chosen_by_its_step(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}-steps"

    def work(one: Run) -> None:
        one.begin()
        save_steps(one, 3)

    run(plan_of(1), tmp_path / "one", work, settings=saving(url, keep_last=3))

    def again(one: Run) -> None:
        assert one.checkpointer.load(one.engine, 1).step == 1

    run(plan_of(1), tmp_path / "two", again, settings=saving(url, keep_last=3))
    assert steps(url)[0] == 1  # it counts as saved last: a restart goes on from it

    def missing(one: Run) -> None:
        with pytest.raises(InputError, match="holds no checkpoint of step 7"):
            one.checkpointer.load(one.engine, 7)

    run(plan_of(1), tmp_path / "three", missing, settings=saving(url))


@pytest.mark.parametrize("text", ["{", '{"format": "other/1"}', "[]"])
def test_an_index_that_is_damaged_is_one_line(tmp_path: Path, text: str) -> None:
    url = f"file://{tmp_path}"
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(InputError) as error:
        RemoteRun(url).newest_first()
    assert INDEX in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_manifest_that_was_changed_is_refused(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"

    def work(one: Run) -> None:
        one.begin()
        save_steps(one, 1)

    run(plan_of(1), tmp_path / "one", work, settings=saving(url))
    remote = RemoteRun(url)
    found = remote.newest_first()[0]
    path = tmp_path / "store" / found.folder / "tutti.json"
    changed = json.loads(path.read_text())
    changed["updates"] = 7
    path.write_text(json.dumps(changed))
    with pytest.raises(DamagedError, match="does not match its checksum"):
        remote.manifest(found)


# --- who does what ---------------------------------------------------------------------------


def test_every_file_is_sent_by_one_rank() -> None:
    files = {".metadata", "plan.json", *(f"__{rank}_0.distcp" for rank in range(5))}
    for size in (1, 2, 5, 8):
        sent = [name for rank in range(size) for name in shares(files, rank, size)]
        assert sorted(sent) == sorted(files)
    assert shares(files, 3, 5) == ["__3_0.distcp"]


READS = st.builds(ChunkRead, st.sampled_from(["a", "b"]), st.integers(0, 9), st.integers(1, 100))


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.integers(0, 7), st.lists(READS, unique=True, max_size=8), min_size=1))
def test_every_chunk_is_read_once_by_one_who_wants_it(wanted: dict[int, list[ChunkRead]]) -> None:
    turns = hand_out(wanted)
    assert [turn.read for turn in turns] == sorted({r for reads in wanted.values() for r in reads})
    for turn in turns:
        assert turn.root in turn.ranks
        assert set(turn.ranks) == {rank for rank, reads in wanted.items() if turn.read in reads}


def test_equal_chunks_are_read_in_equal_parts() -> None:
    reads = [ChunkRead("a", 10 * n, 10) for n in range(40)]
    turns = hand_out(dict.fromkeys(range(4), reads))
    for rank in range(4):
        assert sum(turn.root == rank for turn in turns) == 10
