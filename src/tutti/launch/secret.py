"""The secret of a job: what its ranks know and a stranger does not.

Whoever starts a job makes one and hands it over, by a variable or by a file that only its owner may
read; never on a command line, which everybody on a machine sees. Ranks prove it to each other in
every handshake (`tutti.comm.entry.trust`). Needs no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tutti.errors import InputError

SECRET = "TUTTI_SECRET"
"""The secret itself."""
SECRET_FILE = "TUTTI_SECRET_FILE"
"""A file that holds it."""
SECRET_NAME = "secret"
"""What `tutti launch` calls that file."""
_LEAST_LETTERS = 32
_OTHERS = 0o077  # rights of group and everybody
_REMEDY = "make one by: (umask 077; openssl rand -hex 32 > secret)"


class Secret:
    """Bytes that are in no log."""

    __slots__ = ("_bytes",)

    def __init__(self, value: bytes) -> None:
        self._bytes = value

    def __repr__(self) -> str:
        return "Secret(…)"

    def reveal(self) -> bytes:
        """Return the bytes, to make a key of."""
        return self._bytes


def new_secret() -> str:
    """Return a secret for one job, as text."""
    return secrets.token_hex(32)


def find_secret(environ: Mapping[str, str], ranks: int | None = None) -> Secret:
    """Return the secret of the job that this process is a rank of; it has `ranks`, or WORLD_SIZE.

    Processes that one agent of torchrun started on one machine need not be given any: the first of
    them leaves one for the others, in a file of this user's.
    """
    if environ.get(SECRET):
        return _of_text(environ[SECRET], SECRET)
    if environ.get(SECRET_FILE):
        path = Path(environ[SECRET_FILE])
        return _of_text(_read_private(path, f"{SECRET_FILE}={path}"), f"{SECRET_FILE}={path}")
    world = environ.get("WORLD_SIZE", "1") if ranks is None else str(ranks)
    if world == "1":
        return Secret(new_secret().encode())
    if environ.get("LOCAL_WORLD_SIZE") == world and "TORCHELASTIC_RUN_ID" in environ:
        return _among_siblings(environ)
    raise InputError(
        f"the job has {world} ranks and no secret, so strangers could not be told from them; set "
        f"{SECRET_FILE} (or {SECRET}) to the same on every host: {_REMEDY}; `tutti launch` does so"
    )


def _of_text(text: str, where: str) -> Secret:
    stripped = text.strip()
    if len(stripped) < _LEAST_LETTERS:
        raise InputError(
            f"{where}: a secret of {len(stripped)} letters can be guessed; {_LEAST_LETTERS} is the "
            f"least; {_REMEDY}"
        )
    return Secret(stripped.encode())


def _read_private(path: Path, where: str) -> str:
    """Return the text of a file that nobody but its owner may read."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_IMODE(mode) & _OTHERS:
                raise InputError(
                    f"{where}: others may read it (mode {stat.S_IMODE(mode):o}); "
                    f"chmod 600 {path}, and make a new one if it was so for long"
                )
            return file.read()
    except OSError as error:
        raise InputError(f"{where}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"{where}: is no text; {_REMEDY}") from None


# --- ranks of one agent on one machine -------------------------------------------------------


def _among_siblings(environ: Mapping[str, str]) -> Secret:
    """Return what the first process of an agent left for the others, or leave it."""
    path = _private_folder() / f"secret-{_parent(environ)}"
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(new_secret())
    try:
        os.link(fresh, path)
    except FileExistsError:
        pass
    else:
        atexit.register(_forget, path)
    finally:
        fresh.unlink()
    return _of_text(_read_private(path, str(path)), str(path))


def _private_folder() -> Path:
    """Return a folder of this user's that nobody else can enter."""
    path = Path(tempfile.gettempdir()) / f"tutti-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & _OTHERS:
        raise InputError(
            f"{path} is no folder of yours alone, so the ranks cannot share a secret there; remove "
            f"it, or set {SECRET}"
        )
    return path


def _parent(environ: Mapping[str, str]) -> str:
    """Return a name for the agent that started this process, which no other ever has."""
    pid, began = os.getppid(), ""
    with contextlib.suppress(OSError, IndexError):
        # the name of the program, in brackets, may hold blanks; the start is the 22nd field
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        began = f"{fields[19]}-{os.stat('/proc/self/ns/pid').st_ino}"
    return f"{pid}-{began or environ['TORCHELASTIC_RUN_ID']}-{generation(environ)}"


def _forget(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def generation(environ: Mapping[str, str]) -> str:
    """Return which start of the job this is: a rank of an earlier one is a stranger."""
    return f"{environ.get('TUTTI_ATTEMPT', '0')}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def all_here(environ: Mapping[str, str]) -> bool:
    """Tell whether all ranks of the job are on this machine: then nobody else needs to be heard."""
    world = environ.get("WORLD_SIZE", "1")
    master = environ.get("MASTER_ADDR", "127.0.0.1")
    near = master in ("localhost", "::1") or master.startswith("127.")
    return near or world == environ.get("LOCAL_WORLD_SIZE")
