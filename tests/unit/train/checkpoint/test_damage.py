"""A checkpoint that changed on the disk: refused by name, or passed over for an older whole one."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.any_plan import FOUR, PLAIN, Draft, level
from tests.support.checkpointing import SYNCHRONOUS, Run, kept, run
from tests.support.threads import World
from tests.support.training import in_fp32
from tutti.errors import DamagedError, InputError
from tutti.files import fingerprint
from tutti.plan.plan import Plan
from tutti.train.checkpoint import folders
from tutti.train.checkpoint.manifest import MANIFEST, manifest_text, read_manifest, saved_file
from tutti.train.checkpoint.storage import METADATA

ONE, TWO = (
    in_fp32(Draft(tied=True).line((FOUR, [{"count": n}])).plan(PLAIN, level(1)), "adamw")
    for n in (1, 2)
)
NAMES = (METADATA, "__0_0.distcp", "model/config.json", "plan.json", MANIFEST)


@dataclass
class Loaded:
    """A run of one rank that loads again and again, and what a whole checkpoint comes to."""

    folder: Path
    one: Run
    expected: list[Any]

    def load(self) -> Any:
        progress = self.one.checkpointer.load(self.one.engine, 1)
        state = [(key, value.numpy().tobytes()) for key, _, value in kept(self.one.engine)]
        scale = self.one.engine.scaling.state_dict()
        return [progress, self.one.engine.step_number, scale, torch.get_rng_state().tolist(), state]


def model_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}\n')
    return path


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    base = tmp_path_factory.mktemp("flips")
    model = model_folder(base / "model")

    def work(links: Any) -> Loaded:
        one = Run(links, ONE, base / "run", model_folder=model)
        one.begin()
        one.train(1)
        one.save(samples=4, tokens=256, data={"at": [1, 2]}, validation_loss=3.5)
        found = Loaded(base / "run" / "step-000001", one, [])
        found.expected = found.load()
        return found

    return World(1).run(work)[0]


def flip(path: Path, chance: random.Random) -> Callable[[], None]:
    """Change one byte of a file; return what puts it back."""
    whole = path.read_bytes()
    place = chance.randrange(len(whole))
    changed = bytearray(whole)
    changed[place] ^= chance.randrange(1, 256)
    path.write_bytes(bytes(changed))

    def put_back() -> None:
        path.write_bytes(whole)

    return put_back


def verdict(loaded: Loaded, name: str, seed: int) -> str:
    """Flip a byte of a file and load: return the line that refuses it; empty if nothing changed."""
    put_back = flip(loaded.folder / name, random.Random(seed))
    said = ""
    try:
        same = loaded.load() == loaded.expected
    except InputError as error:
        same, said = True, str(error)
    finally:
        put_back()
    assert same, f"seed {seed}: another state was loaded from {name}"
    assert not said or (Path(name).name in said and len(said.splitlines()) == 1), said
    return said


def check_flips(loaded: Loaded, seeds: range) -> int:
    """Flip a byte for each seed, file after file; return how many were refused."""
    refused = sum(bool(verdict(loaded, NAMES[seed % len(NAMES)], seed)) for seed in seeds)
    assert loaded.load() == loaded.expected
    return refused


def test_all_files_of_a_checkpoint_are_tried(loaded: Loaded) -> None:
    found = {p.relative_to(loaded.folder).as_posix() for p in loaded.folder.rglob("*")}
    assert found - {"model"} == set(NAMES)


def test_one_byte_is_found_or_means_nothing(loaded: Loaded) -> None:
    assert check_flips(loaded, range(25)) >= 20


@pytest.mark.slow
def test_one_byte_of_two_hundred_is_found_or_means_nothing(loaded: Loaded) -> None:
    refused = check_flips(loaded, range(1000, 1200))
    print(f"200 flips: {refused} refused by name, {200 - refused} without effect")
    assert refused >= 160
    for seed in range(200):  # a rank's file has the most parts: archives in archives
        verdict(loaded, NAMES[1], seed)


# --- what is edited --------------------------------------------------------------------------


def saved_steps(folder: Path, steps: int, plan: Plan | None = None, **options: Any) -> None:
    def work(one: Run) -> None:
        one.begin()
        for _ in range(steps):
            one.train(1)
            one.save()

    options.setdefault("settings", replace(SYNCHRONOUS, keep_last=9))
    run(plan or TWO, folder, work, **options)


def load_of(folder: Path, which: str | int = "latest", **options: Any) -> list[tuple[int, Any]]:
    def work(one: Run) -> tuple[int, list[str]]:
        progress = one.checkpointer.load(one.engine, which)
        return progress.step, one.lines

    return run(TWO, folder, work, **options)


def test_an_edited_count_of_updates_is_not_believed(tmp_path: Path) -> None:
    saved_steps(tmp_path, 1)
    path = tmp_path / "step-000001" / MANIFEST
    path.write_text(path.read_text().replace('"updates": 1', '"updates": 100'))
    with pytest.raises(InputError, match="does not match its checksum: damaged, or changed by"):
        read_manifest(tmp_path / "step-000001")
    with pytest.raises(Exception, match="holds no complete checkpoint"):
        load_of(tmp_path)


def reseal(folder: Path, **changes: Any) -> None:
    """Write a manifest whose checksums are right, as somebody who knows how would."""
    manifest = read_manifest(folder)
    files = {name: saved_file(folder / name) for name in manifest.files}
    (folder / MANIFEST).write_text(manifest_text(replace(manifest, **{"files": files, **changes})))


def test_a_shard_outside_of_the_folder_is_not_opened(tmp_path: Path) -> None:
    saved_steps(tmp_path, 1)
    folder = tmp_path / "step-000001"
    shutil.copy(folder / "__0_0.distcp", tmp_path / "evil.distcp")
    with (folder / METADATA).open("rb") as stream:
        metadata = pickle.load(stream)
    for place in metadata.storage_data.values():
        place.relative_path = place.relative_path.replace("__0_0", "../evil")
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    reseal(folder)
    with pytest.raises(Exception, match=r"in '../evil\.distcp', which is no file of this check"):
        load_of(tmp_path)


@pytest.mark.parametrize("name", ["../evil.distcp", "/etc/hostname"])
def test_a_manifest_that_names_a_file_outside_is_refused(tmp_path: Path, name: str) -> None:
    saved_steps(tmp_path, 1)
    folder = tmp_path / "step-000001"
    shutil.copy(folder / "__0_0.distcp", tmp_path / "evil.distcp")
    manifest = read_manifest(folder)
    reseal(folder, files={**manifest.files, name: saved_file(folder / name)})
    with pytest.raises(InputError, match="lies outside of the checkpoint; it is not opened"):
        folders.resolve(tmp_path, 1)


def test_a_link_that_stands_for_a_shard_is_not_followed_outside(tmp_path: Path) -> None:
    saved_steps(tmp_path, 1)
    shard = tmp_path / "step-000001" / "__0_0.distcp"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="lies outside of the checkpoint"):
        folders.resolve(tmp_path, "step-000001")


def test_a_checkpoint_without_checksums_says_of_which_format_it_is(tmp_path: Path) -> None:
    saved_steps(tmp_path, 1)
    path = tmp_path / "step-000001" / MANIFEST
    fields = json.loads(path.read_text())
    del fields["checksum"]
    path.write_text(json.dumps(fields))
    with pytest.raises(DamagedError, match="does not match its checksum"):
        read_manifest(path.parent)
    fields["format"] = "tutti-training/1"
    path.write_text(json.dumps({**fields, "checksum": fingerprint(fields)}))
    with pytest.raises(InputError, match=r"'format' is 'tutti-training/1'; this version"):
        read_manifest(path.parent)


# --- which one is taken ----------------------------------------------------------------------


def spoil(path: Path) -> None:
    """Change a bit in the middle of the numbers of a rank's file."""
    with path.open("r+b") as stream:
        stream.seek(os.path.getsize(path) // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_newest_whole_one_is_taken_and_it_is_said(tmp_path: Path, rank: int) -> None:
    saved_steps(tmp_path, 3)
    spoil(tmp_path / "step-000003" / f"__{rank}_0.distcp")
    (first, lines), (second, silent) = load_of(tmp_path)
    assert (first, second, silent) == (2, 2, [])
    assert len(lines) == 1
    assert lines[0].startswith("checkpoint step-000003 is not used: ")
    assert f"__{rank}_0.distcp: the numbers at byte" in lines[0]


def test_metadata_that_changed_are_passed_over(tmp_path: Path) -> None:
    saved_steps(tmp_path, 2)
    spoil(tmp_path / "step-000002" / METADATA)
    assert load_of(tmp_path)[0][0] == 1


def test_where_none_is_whole_the_oldest_is_named(tmp_path: Path) -> None:
    saved_steps(tmp_path, 2)
    for step in (1, 2):
        spoil(tmp_path / f"step-{step:06}" / "__1_0.distcp")
    with pytest.raises(Exception, match=r"step-000001/__1_0\.distcp: the numbers at byte"):
        load_of(tmp_path)


def test_what_was_found_damaged_does_not_push_out_what_is_whole(tmp_path: Path) -> None:
    saved_steps(tmp_path, 3)
    spoil(tmp_path / "step-000003" / "__0_0.distcp")

    def work(one: Run) -> None:
        one.checkpointer.load(one.engine)
        one.engine.step_number = 10  # another step than the damaged one's
        one.save()

    run(TWO, tmp_path, work, settings=replace(SYNCHRONOUS, keep_last=2))
    kept_steps = [path.name for path in folders.complete_folders(tmp_path)]
    assert kept_steps == ["step-000002", "step-000003", "step-000010"]


def test_a_step_may_be_chosen_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    saved_steps(tmp_path, 3)
    assert load_of(tmp_path, 1)[0] == (1, [])
    # a restart that nobody gives a step takes the same one; its state is untouched
    assert load_of(tmp_path)[0][0] == 1
    assert (tmp_path / "latest").read_text() == "step-000001\n"
    with pytest.raises(Exception, match="holds no checkpoint of step 7; there are 1, 2, 3"):
        load_of(tmp_path, 7)


def test_a_chosen_step_that_is_damaged_is_no_other_step(tmp_path: Path) -> None:
    saved_steps(tmp_path, 3)
    spoil(tmp_path / "step-000002" / "__1_0.distcp")
    with pytest.raises(Exception, match=r"step-000002/__1_0\.distcp: the numbers at byte"):
        load_of(tmp_path, 2)
    assert folders.find_latest(tmp_path) == tmp_path / "step-000003"


def test_the_lowest_validation_loss_is_kept(tmp_path: Path) -> None:
    losses = [4.0, 3.0, None, 3.5, 3.6]

    def work(one: Run) -> None:
        one.begin()
        for loss in losses:
            one.train(1)
            one.save(validation_loss=loss)

    run(ONE, tmp_path, work,
        settings=replace(SYNCHRONOUS, keep_last=1, keep_best=True))  # fmt: skip
    names = [path.name for path in folders.complete_folders(tmp_path)]
    assert names == ["step-000002", "step-000005"]
    assert (tmp_path / "best").read_text() == "step-000002\n"
    assert (tmp_path / "latest").read_text() == "step-000005\n"
    folders.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []
