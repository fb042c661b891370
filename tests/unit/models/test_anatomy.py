"""A block's products are its parameters, sliced as they are, for numbers and for arrays alike."""

from __future__ import annotations

import numpy as np
import pytest

from tutti.models.anatomy import (
    BlockWidths,
    Product,
    Sliced,
    attention_products,
    feed_forward_products,
    router_product,
)
from tutti.models.load import catalog_names, load_model
from tutti.models.parts import BlockSpec
from tutti.models.spec import ModelSpec

MODELS = sorted(catalog_names())


def products(block: BlockSpec, hidden: int, tp: int = 1) -> list[tuple[Product, int]]:
    """Return the products of a block, and how many matrices each has."""
    w = BlockWidths.of(block, hidden)
    found = [(product, 1) for product in attention_products(w, tp)]
    if w.ffn:
        ways = feed_forward_products("mlp", hidden, w.ffn, w.gated, tp=tp)
        found += [(product, 1) for product in ways]
    if w.experts:
        ways = feed_forward_products("moe.experts", hidden, w.expert_ffn, w.gated, tp=tp)
        found += [(product, w.experts) for product in ways]
        found.append((router_product(hidden, w.experts), 1))
    if w.shared_ffn:
        ways = feed_forward_products("moe.shared", hidden, w.shared_ffn, w.gated, tp=tp)
        found += [(product, 1) for product in ways]
    return found


def weights(spec: ModelSpec, unit: int) -> int:
    """Return the elements of a unit's matrices, but for gates that are one column wide."""
    return sum(
        p.size
        for p in spec.parameters(unit)
        if p.matmul_uses and p.name.endswith("weight") and "shared_gate" not in p.name
    )


@pytest.mark.parametrize("name", MODELS)
def test_products_are_the_matrices_of_the_block(name: str) -> None:
    spec = load_model(name)
    for unit in {spec.unit_kind(unit): unit for unit in range(1, spec.head_unit)}.values():
        found = products(spec.block(unit), spec.hidden)
        assert sum(p.columns * p.depth * count for p, count in found) == weights(spec, unit)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [2, 4])
def test_slices_are_equal_parts(name: str, tp: int) -> None:
    spec = load_model(name)
    if spec.tensor_parallel_problem(tp) is not None:
        pytest.skip("cannot be sliced so")
    for block in spec.blocks:
        pairs = zip(products(block, spec.hidden), products(block, spec.hidden, tp), strict=True)
        for (whole, _), (part, _) in pairs:
            assert whole.name == part.name
            if whole.name == "attention.qkv" and block.attention.kv_heads % tp:
                continue  # ranks share a key-value head
            share = {
                Sliced.COLUMNS: (whole.columns / tp, whole.depth),
                Sliced.ROWS: (whole.columns, whole.depth / tp),
                Sliced.NOT: (whole.columns, whole.depth),
            }[whole.sliced]
            assert (part.columns, part.depth) == share


def test_arrays_of_models_give_what_each_model_gives() -> None:
    specs = [load_model(name) for name in MODELS]
    blocks = [(block, spec.hidden) for spec in specs for block in spec.blocks]
    rows = [BlockWidths.of(block, hidden) for block, hidden in blocks]
    every = BlockWidths(*(np.array(column) for column in zip(*rows, strict=True)))
    found = attention_products(every, 2)
    for index, row in enumerate(rows):
        mine = {p.name: (p.columns, p.depth) for p in attention_products(row, 2)}
        theirs = {
            p.name: tuple(float(np.broadcast_to(v, len(rows))[index]) for v in (p.columns, p.depth))
            for p in found
            if np.broadcast_to(p.present, len(rows))[index]
        }
        assert mine == theirs
    assert len(found) > max(len(attention_products(row)) for row in rows)


def test_every_kind_of_attention_is_among_the_models() -> None:
    names = {p.name for m in MODELS for b in load_model(m).blocks for p, _ in products(b, 64)}
    assert {"attention.qkv", "attention.query", "attention.query_down", "attention.kv_up"} <= names
    assert {"mlp.up", "mlp.gate_up", "moe.experts.gate_up", "moe.shared.gate_up"} <= names
