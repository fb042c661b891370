"""What a rank holds of a model: slices, first weights and loading, whatever the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from tests.support.models import CONFIGS, make, spec_of  # noqa: E402
from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.nn import ALONE, Model, ParallelContext, Ranks, initialize, load  # noqa: E402
from tutti.nn.parallel.groups import Single  # noqa: E402


class Member(Single):
    """A rank of a group whose others are not here: good for everything but computing."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank


def places(kind: str, tp: int) -> list[ParallelContext]:
    found: list[ParallelContext] = [Ranks(tensor=Member(tp, rank)) for rank in range(tp)]
    experts = spec_of(kind).num_experts
    if experts:
        counts = (experts - 3, 1, 2)
        found += [Ranks(experts=Member(3, r), expert_counts=counts) for r in range(3)]
    return found


def model_at(kind: str, parallel: ParallelContext = ALONE) -> Model:
    return Model(spec_of(kind), Operators("cpu"), parallel=parallel)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("tp", [2, 4])
def test_first_weights_do_not_depend_on_the_plan(kind: str, tp: int) -> None:
    whole = model_at(kind)
    initialize(whole, seed=5)
    expected = {logical.name: logical.view for logical in whole.logical_tensors()}
    covered: dict[str, torch.Tensor] = {
        name: torch.zeros(view.shape, dtype=torch.bool) for name, view in expected.items()
    }
    for parallel in places(kind, tp):
        part = model_at(kind, parallel)
        initialize(part, seed=5)
        for logical in part.logical_tensors():
            assert torch.equal(logical.view, expected[logical.name][logical.slices]), logical.name
            if parallel.tensor.size > 1:
                covered[logical.name][logical.slices] = True
    assert all(seen.all() for seen in covered.values()), "the ranks hold all of it together"


def test_first_weights_depend_on_seed_and_name() -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        model = model_at("dense")
        initialize(model, seed=seed)
        return {logical.name: logical.view.clone() for logical in model.logical_tensors()}

    one, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["1.mlp.up.weight"], other["1.mlp.up.weight"])
    assert not torch.equal(one["1.mlp.up.weight"], one["2.mlp.up.weight"])
    assert float(one["1.mlp.up.weight"].std()) == pytest.approx(0.02, rel=0.1)
    assert (one["1.mlp_norm.weight"] == 1).all()
    assert (one["1.attention.key.bias"] == 0).all()
    offset = model_at("tied")
    initialize(offset)
    norms = [v.view for v in offset.logical_tensors() if v.name == "1.mlp_norm.weight"]
    assert (norms[0] == 0).all(), "one is added to it"


@dataclass
class Recorded:
    """A checkpoint in memory that remembers what was read."""

    tensors: dict[str, torch.Tensor]
    read_names: list[str]
    numbers_read: int = 0

    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def read(self, name: str, slices: Sequence[slice] | None = None) -> torch.Tensor:
        self.read_names.append(name)
        found = self.tensors[name] if slices is None else self.tensors[name][tuple(slices)]
        self.numbers_read += found.numel()
        return found


def checkpoint(kind: str) -> Recorded:
    whole = make(spec_of(kind), dtype=torch.float32)
    return Recorded({x.name: x.view.clone() for x in whole.logical_tensors()}, [])


@pytest.mark.parametrize("kind", ["dense", "one-kv-head", "latent", "experts"])
def test_a_rank_reads_its_slices_only(kind: str) -> None:
    stored = checkpoint(kind)
    for parallel in places(kind, 2):
        stored.read_names.clear()
        stored.numbers_read = 0
        model = model_at(kind, parallel)
        load(model, stored)
        assert stored.numbers_read == sum(p.numel() for p in model.parameters())
        for logical in model.logical_tensors():
            assert torch.equal(logical.view, stored.tensors[logical.name][logical.slices])


def test_key_value_heads_are_copied_where_there_are_fewer_than_ranks() -> None:
    cuts = []
    for rank in range(4):
        model = model_at("dense", Ranks(tensor=Member(4, rank)))
        found = {x.name: x for x in model.logical_tensors()}
        key = found["1.attention.key.weight"]
        cuts.append((key.slices[0].start, key.slices[0].stop))
        assert key.piece.partial, "its copies each have a part of the gradient"
        assert not found["1.attention.query.weight"].piece.partial
    assert cuts == [(0, 8), (0, 8), (8, 16), (8, 16)]


def test_which_gradients_copies_add_up() -> None:
    def partial(parallel: ParallelContext, kind: str = "experts") -> set[str]:
        return {
            x.name.split(".", 1)[1]
            for x in model_at(kind, parallel).logical_tensors()
            if x.piece.partial and x.name.startswith("1.")
        }

    assert partial(ALONE) == set()
    assert partial(Ranks(tensor=Member(2, 0))) == set(), "all tokens on all ranks"
    shared = partial(Ranks(tensor=Member(2, 0), sequence_parallel=True))
    assert {"mlp_norm.weight", "moe.router.weight", "moe.shared_gate.weight"} <= shared
    assert "attention.query.weight" not in shared
    heads = partial(Ranks(tensor=Member(2, 0)), "one-kv-head")
    assert {"attention.query_norm.weight", "attention.key.weight"} <= heads


def test_bad_checkpoints_are_named() -> None:
    stored = checkpoint("dense")
    model = model_at("dense")
    missing = Recorded({k: v for k, v in stored.tensors.items() if "2.mlp.up" not in k}, [])
    with pytest.raises(InputError, match=r"the checkpoint has no tensor '2.mlp.up.weight'"):
        load(model, missing)
    short = Recorded({**stored.tensors, "2.mlp.up.weight": torch.zeros(3, 32)}, [])
    with pytest.raises(
        InputError, match=r"'2.mlp.up.weight': expected \[48, 32\], found \[3, 32\]"
    ):
        load(model, short)


def test_bad_plans_are_named() -> None:
    with pytest.raises(InputError, match="tp=3 does not divide the 4 attention heads"):
        model_at("dense", Ranks(tensor=Member(3, 0)))
    with pytest.raises(InputError, match="expected 2 numbers that sum to the layer's 5 experts"):
        model_at("experts", Ranks(experts=Member(2, 0), expert_counts=(2, 2)))
