"""Where a rank has its secret from, and what is refused as one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tutti.errors import InputError
from tutti.launch.secret import all_here, find_secret, new_secret

MANY = {"WORLD_SIZE": "4"}


def test_by_variable_and_by_file(tmp_path: Path) -> None:
    text = new_secret()
    assert find_secret({**MANY, "TUTTI_SECRET": text}).reveal() == text.encode()
    path = tmp_path / "secret"
    path.write_text(text + "\n")
    path.chmod(0o600)
    assert find_secret({**MANY, "TUTTI_SECRET_FILE": str(path)}).reveal() == text.encode()
    path.chmod(0o640)
    with pytest.raises(InputError, match=r"others may read it \(mode 640\); chmod 600"):
        find_secret({**MANY, "TUTTI_SECRET_FILE": str(path)})
    with pytest.raises(InputError, match=r"cannot be read .No such file"):
        find_secret({**MANY, "TUTTI_SECRET_FILE": str(tmp_path / "none")})


def test_a_short_one_is_refused() -> None:
    with pytest.raises(InputError, match="a secret of 5 letters can be guessed; 32 is the least"):
        find_secret({**MANY, "TUTTI_SECRET": "12345"})


def test_several_hosts_need_one() -> None:
    with pytest.raises(InputError, match=r"4 ranks and no secret.*TUTTI_SECRET_FILE"):
        find_secret({**MANY, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"})
    assert find_secret({}).reveal() != find_secret({"WORLD_SIZE": "1"}).reveal()


FIND = "from tutti.launch.secret import find_secret as f; import os; print(f(os.environ).reveal())"


def test_ranks_of_one_agent_share_theirs(tmp_path: Path) -> None:
    """Processes with one parent find the same; what they left for each other is gone in the end."""
    environment = {
        **os.environ, **MANY, "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none",
        "TMPDIR": str(tmp_path),
    }  # fmt: skip
    environment.pop("TUTTI_SECRET", None)
    children = [
        subprocess.Popen([sys.executable, "-c", FIND + "; input()"], env=environment,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]  # fmt: skip
    found = set()
    for child in children:
        assert child.stdout is not None
        found.add(child.stdout.readline())
    assert len(found) == 1
    assert len(found.pop()) > 64
    folder = tmp_path / f"tutti-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    (left,) = folder.iterdir()
    assert left.stat().st_mode & 0o777 == 0o600
    for child in children:
        child.communicate("\n", timeout=60)
    assert not list(folder.iterdir())


def test_a_folder_that_others_enter_is_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"tutti-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(InputError, match="is no folder of yours alone"):
        find_secret({**MANY, "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"})


@pytest.mark.parametrize(
    ("variables", "here"),
    [
        ({}, True),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "gpu0"}, True),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1"}, True),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu0"}, False),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1"}, False),
    ],
)
def test_who_needs_to_be_heard(variables: dict[str, str], here: bool) -> None:
    assert all_here(variables) is here
