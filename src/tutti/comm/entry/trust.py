"""Trust: how two ranks prove to each other that they are of one job. Pure: no sockets here.

Three messages of fixed size, before anything else on a connection. The caller says who it is, whom
it calls, and a random number; the called one answers with a random number of its own and a proof;
the caller proves itself last. A proof is a keyed hash over all that was said, so that one overheard
is worth nothing for another connection, another pair of ranks, or another start of the job. Nothing
is hidden by this: what follows can be read, and changed, by whoever controls the wire between.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

from tutti.errors import TuttiError
from tutti.launch.secret import Secret

MAGIC = b"tutti/3\n"
_HELLO = struct.Struct("<8sII32s")  # magic, who calls, who is called, a random number
_NONCE_BYTES = _PROOF_BYTES = 32
HELLO_BYTES = _HELLO.size
REPLY_BYTES = _NONCE_BYTES + _PROOF_BYTES
PROOF_BYTES = _PROOF_BYTES


class StrangerError(TuttiError):
    """Somebody who is no rank of this job."""


class Key:
    """What a secret is worth for one purpose in one start of a job."""

    __slots__ = ("_bytes",)

    def __init__(self, secret: Secret, *purpose: str) -> None:
        text = "\0".join(("tutti", *purpose)).encode()
        self._bytes = hmac.digest(secret.reveal(), text, hashlib.sha256)

    def __repr__(self) -> str:
        return "Key(…)"

    def proof(self, what: bytes, *said: bytes) -> bytes:
        """Return what only the holders of the key can say about some bytes."""
        return hmac.digest(self._bytes, what + b"\0" + b"".join(said), hashlib.sha256)

    def seal(self, text: str) -> str:
        """Return a text with its proof, to be left where strangers write, too."""
        return f"{self.proof(b'sealed', text.encode()).hex()} {text}"

    def unseal(self, sealed: str) -> str:
        """Return the text of `seal`, or raise."""
        proof, _, text = sealed.partition(" ")
        due = self.proof(b"sealed", text.encode()).hex()
        if not hmac.compare_digest(proof.encode(), due.encode()):
            raise StrangerError("was not written by a rank of this job")
        return text


class Caller:
    """The side that connects."""

    def __init__(self, key: Key, rank: int, peer: int) -> None:
        self._key, self._peer = key, peer
        self.hello = _HELLO.pack(MAGIC, rank, peer, secrets.token_bytes(_NONCE_BYTES))

    def answer(self, reply: bytes) -> bytes:
        """Return the proof of this side, once the other side has given its own."""
        nonce, proof = reply[:_NONCE_BYTES], reply[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, self._key.proof(b"called", self.hello, nonce)):
            raise StrangerError(
                "is held by somebody who does not know this job's secret (or has that of another "
                "start of it)"
            )
        return self._key.proof(b"caller", self.hello, nonce)


class Called:
    """The side that listens."""

    def __init__(self, key: Key, rank: int, world: int) -> None:
        self._key, self._rank, self._world = key, rank, world
        self._said = b""
        self.peer = -1  # who says to be calling

    @staticmethod
    def check_begin(begin: bytes) -> None:
        """Raise if a greeting that has not all arrived is none."""
        if begin[: len(MAGIC)] != MAGIC[: len(begin)]:
            raise StrangerError("no greeting of a rank")

    def reply(self, hello: bytes) -> bytes:
        """Answer a greeting."""
        self.check_begin(hello)
        _, self.peer, wanted, _ = _HELLO.unpack(hello)
        if self.peer >= self._world or wanted != self._rank:
            raise StrangerError(f"greeting from rank {self.peer} of {self._world} to rank {wanted}")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._said = hello + nonce
        return nonce + self._key.proof(b"called", self._said)

    def check(self, proof: bytes) -> int:
        """Return the rank that has proven itself."""
        if not hmac.compare_digest(proof, self._key.proof(b"caller", self._said)):
            raise StrangerError(f"wrong proof for rank {self.peer}: it knows another secret")
        return self.peer
