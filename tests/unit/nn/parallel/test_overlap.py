"""Products in pieces beside their collectives: the gradients of the whole, the bits of in turn."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.support.models import batch_of, make, spec_of, total_loss  # noqa: E402
from tests.support.threads import ThreadLinks, World  # noqa: E402
from tutti.accelerator.gradients import WeightGradients  # noqa: E402
from tutti.nn import Ranks  # noqa: E402
from tutti.nn.parallel.groups import InTurn, shares  # noqa: E402
from tutti.nn.parallel.overlap import Cut  # noqa: E402

KINDS = ("dense", "one-kv-head", "qk-norm", "tied", "alibi", "positions", "latent", "experts")
LENGTHS = (13, 9, 17)  # 39 tokens: no number of pieces or ranks here divides them


class Noting:
    """A group that notes how many started collectives were under way at once."""

    def __init__(self, group: Any) -> None:
        self._group, self.size, self.rank = group, group.size, group.rank
        self.started: list[str] = []
        self.under_way = self.most = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._group, name)
        if not name.startswith("start_"):
            return call

        def start(*args: Any) -> Any:
            self.started.append(name.removeprefix("start_"))
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            return _Noted(self, call(*args))

        return start


class _Noted:
    def __init__(self, notes: Noting, pending: Any) -> None:
        self._notes, self._pending = notes, pending

    def wait(self) -> Any:
        self._notes.under_way -= 1
        return self._pending.wait()


def gradients(
    links: ThreadLinks,
    kind: str,
    *,
    chunks: int = 1,
    sequence_parallel: bool = True,
    in_turn: bool = False,
    later: bool = False,
    lengths: tuple[int, ...] = LENGTHS,
    dtype: Any = None,
) -> tuple[float, dict[str, Any], Noting]:
    """A rank's loss and gradients."""
    spec = spec_of(kind)
    group = Noting(links.group(range(links.world.size)))
    parallel = Ranks(
        tensor=InTurn(group) if in_turn else group,
        sequence_parallel=sequence_parallel,
        overlap_chunks=chunks,
    )
    model = make(spec, parallel=parallel, **({} if dtype is None else {"dtype": dtype}))
    queue = WeightGradients() if later else None
    out = model(None, batch_of(spec, lengths), queue)
    total_loss(out).backward()
    if queue is not None:
        assert len(queue)
        queue.run()
    assert group.under_way == 0, "every collective was waited for"
    found = {x.name: x.gradient for x in model.logical_tensors() if x.piece.parameter.trainable}
    return float(out.loss.detach()), found, group


def runs(size: int, kind: str, **words: Any) -> list[tuple[float, dict[str, Any], Noting]]:
    return World(size).run(lambda links: gradients(links, kind, **words))


def assert_close(found: list[Any], expected: list[Any], tolerance: float) -> None:
    for (loss, own, _), (whole_loss, whole, _) in zip(found, expected, strict=True):
        assert loss == pytest.approx(whole_loss, rel=tolerance)
        for name, value in whole.items():
            if value is None:
                assert own[name] is None
                continue
            scale = max(float(v.norm()) for v in whole.values() if v is not None)
            error = float((own[name] - value).norm())
            assert error <= tolerance * scale, (name, error / scale)


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for (loss, own, _), (other_loss, other, _) in zip(found, expected, strict=True):
        assert loss == other_loss
        for name, value in other.items():
            same = value is own[name] is None or torch.equal(value, own[name])
            assert same, f"{name} differs in its bits"


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_give_the_gradients_of_the_whole(kind: str, sequence_parallel: bool) -> None:
    whole = runs(2, kind, sequence_parallel=sequence_parallel)
    for chunks in (2, 3):
        found = runs(2, kind, chunks=chunks, sequence_parallel=sequence_parallel)
        assert_close(found, whole, 1e-12)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_pieces_are_those_run_one_after_the_other_to_the_bit(
    sequence_parallel: bool, later: bool
) -> None:
    words = {"chunks": 4, "sequence_parallel": sequence_parallel, "later": later}
    for kind, dtype in (("dense", torch.float32), ("latent", torch.bfloat16)):
        beside = runs(4, kind, **words, dtype=dtype)
        in_turn = runs(4, kind, **words, dtype=dtype, in_turn=True)
        assert_equal(beside, in_turn)
        assert all(notes.most >= 4 for _, _, notes in beside)
        assert all(notes.started == beside[0][2].started for _, _, notes in beside)
    whole = runs(4, "dense", sequence_parallel=sequence_parallel, later=later)
    assert_close(runs(4, "dense", **words), whole, 1e-12)


def test_fewer_tokens_than_pieces() -> None:
    """Some ranks then have nothing to give to a piece, and some pieces are nobody's."""
    for lengths in ((3,), (5, 2), (1,)):
        whole = runs(4, "dense", lengths=lengths)
        assert_close(runs(4, "dense", lengths=lengths, chunks=4), whole, 1e-12)


def test_what_a_block_starts() -> None:
    """A gather or a sum for each piece of a product, and one more gather for a column's weight."""
    _, _, notes = runs(2, "dense", chunks=2)[0]
    per_block = {"all_gather": 2 * 2 + 2 * 2 + 2, "reduce_scatter": 2 * 2 + 2 * 2}
    for name, count in per_block.items():
        assert notes.started.count(name) == 2 * count, name
    assert notes.started.count("all_reduce") == 0
    _, _, notes = runs(2, "dense", chunks=2, sequence_parallel=False)[0]
    assert notes.started == ["all_reduce"] * (2 * (2 * 2 + 2 * 2))


def test_pieces_keep_a_rank_s_own_tokens_only() -> None:
    """The inputs of a block's two column products need not be whole: plans count on that."""

    def kept(links: ThreadLinks, chunks: int) -> int:
        sizes: dict[int, int] = {}

        def note(x: Any) -> Any:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        spec = spec_of("dense")
        group = links.group(range(links.world.size))
        parallel = Ranks(tensor=group, sequence_parallel=True, overlap_chunks=chunks)
        model = make(spec, parallel=parallel, units=[1])
        x = torch.ones(10, spec.hidden, dtype=torch.float64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda y: y):
            y, _ = model.stream(x, batch_of(spec, (13, 9, 18)), WeightGradients())
        assert y.shape == x.shape
        return sum(sizes.values())

    whole, pieces = (World(4).run(lambda links, n=n: kept(links, n)) for n in (1, 4))
    hidden = 32 * 8  # bytes of a token
    for before, after in zip(whole, pieces, strict=True):
        assert before - after == 2 * (40 - 10) * hidden, "of both inputs the other ranks' tokens"


# --- experts ---------------------------------------------------------------------------------


class Diary:
    """Operators and groups that write down what was called, in order."""

    def __init__(self, inner: Any, lines: list[str]) -> None:
        self._inner, self._lines = inner, lines

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found) or name == "wait":
            return found

        def called(*args: Any, **words: Any) -> Any:
            result = found(*args, **words)
            if name == "start_all_to_all":
                self._lines.append("sets out")
                return _Line(result, self._lines)
            if name == "gated_activation":
                rows = args[0].shape[0]
                self._lines.append("shared" if rows == sum(LENGTHS) else "experts")
            return result

        return called


class _Line:
    def __init__(self, pending: Any, lines: list[str]) -> None:
        self._pending, self._lines = pending, lines

    def wait(self) -> Any:
        self._lines.append("is there")
        return self._pending.wait()


def experts_run(links: ThreadLinks, kind: str, *, in_turn: bool) -> tuple[float, Any, list[str]]:
    """A rank of four that share out the experts of one micro-batch each."""
    spec, lines = spec_of(kind), []
    group: Any = Diary(links.group(range(4)), lines)
    counts = shares(spec.num_experts, 4)
    parallel = Ranks(experts=InTurn(group) if in_turn else group, expert_counts=counts)
    model = make(spec, parallel=parallel, dtype=torch.float32)
    for block in model.blocks:
        if block.moe is not None:
            block.moe.operators = Diary(block.moe.operators, lines)
            block.moe.shared.operators = block.moe.experts.operators = block.moe.operators
            note_gradients(block.moe.shared, lines)
    queue = WeightGradients()
    out = model(None, batch_of(spec, LENGTHS), queue)
    total_loss(out).backward()
    queue.run()
    found = {x.name: x.gradient for x in model.logical_tensors() if x.piece.parameter.trainable}
    return float(out.loss.detach()), found, lines


def note_gradients(shared: Any, lines: list[str]) -> None:
    """Write down when backward comes to the products of both halves of a layer."""

    def note(_: Any) -> None:
        lines.append("shared back")

    for product in (shared.up, shared.down):
        product.register_forward_hook(lambda _, __, y: y.register_hook(note) and None)


@pytest.mark.parametrize("kind", ["experts", "latent"])
def test_shared_experts_run_while_rows_travel(kind: str) -> None:
    beside = World(4).run(lambda links: experts_run(links, kind, in_turn=False))
    in_turn = World(4).run(lambda links: experts_run(links, kind, in_turn=True))
    assert_equal(beside, in_turn)
    layers = 2 if kind == "experts" else 1
    forward = ["sets out", "shared", "is there", "sets out", "is there"]
    backward = ["sets out", "shared back", "is there"] * 2
    for _, _, lines in beside:
        found = [line for line in lines if line != "experts"]
        assert found == forward * layers + backward * layers


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 9))
def test_a_cut_loses_nothing(tokens: int, ways: int, chunks: int) -> None:
    cut = Cut(shares(tokens, ways), chunks)
    x = torch.arange(3 * tokens).view(tokens, 3)
    pieces = list(cut.whole(x))
    assert torch.equal(cut.joined(pieces), x)
    assert torch.equal(cut.by_piece(x), torch.cat(pieces))
    assert all(len(piece) == sum(rows) > 0 for piece, rows in zip(pieces, cut.pieces, strict=True))
    parts = x.split(list(shares(tokens, ways)))
    own = [torch.cat(cut.own(part, rank)) for rank, part in enumerate(parts)]
    assert torch.equal(torch.cat(own), x)
    longest = [max(rows) - min(rows) for rows in cut.pieces]
    assert max(longest) <= 1, "every rank sends about as much in each piece"
