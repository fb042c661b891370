"""Batches: chunks of context-parallel ranks, tables, and the key-value cache."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.support.models import CONFIGS, LENGTHS, batch_of, make, spec_of  # noqa: E402
from tutti.accelerator import PagedSegments  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.models import ModelSpec, RotaryScaling, RotarySpec  # noqa: E402
from tutti.nn import Batch, PagedCache, greedy  # noqa: E402
from tutti.nn.rotary import frequencies, table  # noqa: E402

SPEC = spec_of("dense")


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(2, 4))
def test_shares_cover_every_token_once_in_balance(lengths: list[int], ways: int) -> None:
    count = sum(lengths)
    tokens = torch.arange(count)
    whole = Batch.of(SPEC, tokens, lengths, targets_t=tokens)
    if max(lengths) < 2 * ways:
        return
    shares = [whole.share(SPEC, ways, rank) for rank in range(ways)]
    assert torch.equal(torch.cat([s.tokens_t for s in shares]).sort().values, tokens)
    gathered = torch.cat([s.tokens_t for s in shares])
    pairs = []
    for share in shares:
        assert torch.equal(gathered[share.key_order], tokens), "keys in whole-sequence order"
        assert torch.equal(share.targets_t, share.tokens_t)
        assert torch.equal(share.positions_t, whole.positions_t[share.tokens_t])
        assert torch.equal(share.sequence_t, whole.sequence_t[share.tokens_t])
        assert share.key_rows == tuple(s.num_tokens for s in shares)
        assert torch.equal(share.tables[0][0], whole.tables[0][0][share.tokens_t])
        pairs.append(float((share.positions_t + 1).sum()))
    if all(length % (2 * ways) == 0 for length in lengths):
        assert max(pairs) == min(pairs), "equally many query-key pairs"


def test_too_short_for_context_parallelism() -> None:
    with pytest.raises(InputError, match="too few tokens"):
        Batch.of(SPEC, torch.zeros(2, dtype=torch.long), [2]).share(SPEC, 4, 0)


def test_packed_sequences_count_their_own_length() -> None:
    scaling = RotaryScaling(kind="dynamic", factor=2.0, original_length=10)
    spec = RotarySpec(theta=1e4, dim=8, scaling=scaling)
    positions = torch.cat([torch.arange(30), torch.arange(5)])
    sequence = torch.repeat_interleave(torch.arange(2), torch.tensor([30, 5]))
    cos, _ = table(spec, positions, sequence, (30, 5))
    alone, _ = table(spec, torch.arange(5), torch.zeros(5, dtype=torch.long), (5,))
    assert torch.equal(cos[30:], alone)
    assert not torch.equal(frequencies(spec, 30), frequencies(spec, 5))
    assert torch.equal(frequencies(spec, 10), frequencies(spec, 5)), "up to the original length"


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_cache_changes_nothing(kind: str) -> None:
    spec = spec_of(kind)
    model, whole = make(spec), batch_of(spec)
    with torch.no_grad():
        expected = model.logits(whole).split(list(LENGTHS))
    cache = PagedCache(spec, model.operators, pages=10, page_size=4, dtype=torch.float64)
    bases = torch.tensor(LENGTHS)
    tables = [[4, 1, 7], [2, 9, 3], [8, 5, 6]]
    each = whole.tokens_t.split(list(LENGTHS))
    found: list[list[torch.Tensor]] = [[] for _ in each]
    steps = [(0, 4), (4, 5), (5, 9)]  # a prompt, one token, several
    with torch.no_grad():
        for first, last in steps:
            tokens = torch.cat([own[first:last] for own in each])
            rows = PagedSegments.of([last - first] * 3, [last] * 3, tables, 4)
            batch = Batch.cached(spec, tokens, cache, rows, bases)
            for rows, part in zip(
                found, model.logits(batch).split([last - first] * 3), strict=True
            ):
                rows.append(part)
    for rows, logits in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(rows), logits[:9], rtol=1e-11, atol=1e-11)


def test_greedy_takes_the_most_likely_token_and_stops() -> None:
    spec: ModelSpec = spec_of("dense")
    model = make(spec)
    prompts = [[1, 2, 3, 4, 5], [7, 8]]
    found = greedy(model, prompts, 6)
    for prompt, new in zip(prompts, found, strict=True):
        tokens = list(prompt)
        for token in new:
            with torch.no_grad():
                logits = model.logits(Batch.of(spec, torch.tensor(tokens), [len(tokens)]))
            assert int(logits[-1].argmax()) == token
            tokens.append(token)
    assert greedy(model, prompts[:1], 6) == found[:1], "alone as in company"
    stopped = greedy(model, prompts, 6, stop=[found[0][2]])
    assert stopped[0] == found[0][: found[0].index(found[0][2]) + 1]
