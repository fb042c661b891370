"""Documents packed into rows train as they would apart, under context parallelism, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.support.models import make, spec_of, total_loss  # noqa: E402
from tests.support.threads import ThreadLinks, World  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.nn import Batch, Ranks  # noqa: E402
from tutti.nn.parallel.rows import pieces_of, rows_of  # noqa: E402
from tutti.plan.plan import ContextKind  # noqa: E402

ROW = 26  # not a multiple of the chunks of 2 or 3 ranks
DOCUMENTS = (5, 1, 20, 3, 16, 7)  # two rows; the last document is padding


def tokens_and_targets(vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, vocab, (sum(DOCUMENTS),), generator=generator)
    targets = torch.randint(0, vocab, (sum(DOCUMENTS),), generator=generator)
    targets[-DOCUMENTS[-1] :] = -100
    return tokens, targets


def run_rank(links: ThreadLinks, kind: str, context_kind: ContextKind) -> Any:
    spec, ways = spec_of(kind), links.world.size
    model = make(spec, parallel=Ranks(context=links.group(range(ways))), context_kind=context_kind)
    tokens, targets = tokens_and_targets(spec.vocab)
    whole = Batch.of(spec, tokens, DOCUMENTS, targets_t=targets, row_length=ROW)
    out = model(None, whole.share(spec, ways, links.rank))
    total_loss(out).backward()
    gradients = {x.name: x.gradient for x in model.logical_tensors() if x.gradient is not None}
    return float(out.loss.detach()), gradients


def separate_documents(kind: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Each document in a batch of its own, in one process."""
    spec = spec_of(kind)
    model = make(spec)
    tokens, targets = tokens_and_targets(spec.vocab)
    loss = 0.0
    for own, wanted in zip(tokens.split(DOCUMENTS), targets.split(DOCUMENTS), strict=True):
        out = model(None, Batch.of(spec, own, [len(own)], targets_t=wanted))
        total_loss(out).backward()
        loss += float(out.loss.detach())
    return loss, {x.name: x.gradient for x in model.logical_tensors() if x.gradient is not None}


@pytest.mark.parametrize("kind", ["dense", "experts", "latent", "alibi", "positions"])
@pytest.mark.parametrize("context_kind", ContextKind)
@pytest.mark.parametrize("ways", [1, 2, 3])
def test_rows_train_like_separate_documents(
    ways: int, context_kind: ContextKind, kind: str
) -> None:
    expected_loss, expected = separate_documents(kind)
    found = World(ways).run(lambda links: run_rank(links, kind, context_kind))
    assert sum(loss for loss, _ in found) == pytest.approx(expected_loss, rel=1e-12)
    zero = torch.zeros(())
    for name, gradient in expected.items():
        total = sum((own.get(name, zero) for _, own in found), start=zero)
        error = float((total - gradient).norm())
        assert error <= 1e-10 * max(float(gradient.norm()), 1e-3), name


def rows_drawn(rows: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """Documents of several rows, the last of each filled up to the longest row."""
    longest = max(sum(row) for row in rows)
    full = [[*row[:-1], longest - sum(row[:-1])] for row in rows]
    return [length for row in full for length in row], longest


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(2, 4),
)
def test_every_query_sees_its_keys_once_on_their_way_around(
    rows: list[list[int]], ways: int
) -> None:
    lengths, row_length = rows_drawn(rows)
    if row_length < 2 * ways:
        return
    spec, count = spec_of("dense"), sum(lengths)
    whole = Batch.of(spec, torch.arange(count) % spec.vocab, lengths, row_length=row_length)
    where = [
        [t for p in pieces_of(lengths, rows_of(lengths, row_length), ways, r)
         for t in range(p.first, p.last)]
        for r in range(ways)
    ]  # fmt: skip
    assert sorted(t for part in where for t in part) == list(range(count))
    for rank in range(ways):
        seen: dict[int, list[int]] = {t: [] for t in where[rank]}
        for step, (segments, queries_t) in enumerate(whole.share(spec, ways, rank).ring):
            if segments is None:
                continue
            held, at = where[(rank - step) % ways], 0
            own = range(len(where[rank])) if queries_t is None else queries_t.tolist()
            for q, k, start in zip(
                segments.queries, segments.keys, segments.key_starts, strict=True
            ):
                for i in range(q):
                    stop = start + k if step else start + k - q + i + 1
                    seen[where[rank][own[at + i]]] += held[start:stop]
                at += q
        for token, keys in seen.items():
            document = int(whole.sequence_t[token])
            first = sum(lengths[:document])
            assert sorted(keys) == list(range(first, token + 1))


def test_documents_that_do_not_fill_their_rows() -> None:
    with pytest.raises(InputError, match="runs over the end of a row of 4 tokens"):
        rows_of([3, 3, 2], 4)
    with pytest.raises(InputError, match="7 tokens do not fill rows of 4; pad"):
        rows_of([4, 3], 4)
