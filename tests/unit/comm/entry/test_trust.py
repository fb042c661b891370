"""The handshake: who knows the secret is believed, once, on this connection, as this rank."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tutti.comm.entry.trust import HELLO_BYTES, MAGIC, Called, Caller, Key, StrangerError
from tutti.launch.secret import Secret

KEY = Key(Secret(b"s" * 32), "mesh", "session")
OTHERS = [
    Key(Secret(b"t" * 32), "mesh", "session"),  # another job
    Key(Secret(b"s" * 32), "mesh", "later"),  # another start of it
    Key(Secret(b"s" * 32), "store", "session"),  # another port of it
]


def test_both_sides_learn_who_the_other_is() -> None:
    caller, called = Caller(KEY, 2, 1), Called(KEY, 1, 4)
    proof = caller.answer(called.reply(caller.hello))
    assert called.check(proof) == 2
    assert len(caller.hello) == HELLO_BYTES


@pytest.mark.parametrize("other", OTHERS)
def test_another_secret_is_refused_by_either_side(other: Key) -> None:
    caller, called = Caller(other, 2, 1), Called(KEY, 1, 4)
    reply = called.reply(caller.hello)
    with pytest.raises(StrangerError, match="does not know this job's secret"):
        caller.answer(reply)
    proof = other.proof(b"caller", caller.hello, reply[:32])
    with pytest.raises(StrangerError, match="wrong proof for rank 2"):
        called.check(proof)


def test_an_overheard_handshake_is_worth_nothing() -> None:
    caller, called = Caller(KEY, 2, 1), Called(KEY, 1, 4)
    reply = called.reply(caller.hello)
    proof = caller.answer(reply)
    assert called.check(proof) == 2
    again = Called(KEY, 1, 4)
    again.reply(caller.hello)  # with a random number of its own
    with pytest.raises(StrangerError):
        again.check(proof)
    with pytest.raises(StrangerError):  # nor can the listening side be played
        Caller(KEY, 2, 1).answer(reply)


def test_a_proof_cannot_be_sent_back_to_its_maker() -> None:
    """Whoever has no key could let the two ends of a rank answer each other."""
    caller, called = Caller(KEY, 2, 1), Called(KEY, 1, 4)
    reply = called.reply(caller.hello)
    with pytest.raises(StrangerError):
        called.check(reply[32:])


def test_a_proof_holds_for_one_rank() -> None:
    caller, called = Caller(KEY, 2, 1), Called(KEY, 1, 4)
    forged = bytearray(caller.hello)
    forged[len(MAGIC)] = 3  # "I am rank 3"
    with pytest.raises(StrangerError):
        caller.answer(called.reply(bytes(forged)))


@pytest.mark.parametrize(("rank", "peer"), [(4, 1), (2, 0), (2**32 - 1, 1)])
def test_greetings_of_no_rank_or_to_another(rank: int, peer: int) -> None:
    with pytest.raises(StrangerError, match=f"greeting from rank {rank}"):
        Called(KEY, 1, 4).reply(Caller(KEY, rank, peer).hello)


def test_the_first_wrong_byte_is_enough() -> None:
    Called.check_begin(b"")
    Called.check_begin(MAGIC[:3])
    for begin in (b"G", b"tutti/2\n", bytes(HELLO_BYTES)):
        with pytest.raises(StrangerError, match="no greeting"):
            Called.check_begin(begin)


def test_sealed_words_are_believed_unchanged() -> None:
    sealed = KEY.seal("29501")
    assert KEY.unseal(sealed) == "29501"
    for wrong in ("29502", sealed.replace("29501", "29502"), OTHERS[0].seal("29501"), "", "é x"):
        with pytest.raises(StrangerError):
            KEY.unseal(wrong)


def test_nothing_shows_the_secret() -> None:
    assert "ssss" not in repr((Secret(b"s" * 32), KEY))
