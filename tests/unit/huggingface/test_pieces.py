"""Every rule is a view that works both ways, whole and in slices."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.huggingface.dtypes import BY_NAME
from tutti.huggingface.pieces import gather, scatter, whole
from tutti.huggingface.tensor_file import Raw
from tutti.huggingface.weight_map import (
    Each,
    ExpertStack,
    Heads,
    Rows,
    Rule,
    Same,
    Table,
    Transposed,
    WeightMap,
    resolve,
)
from tutti.models import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    QkNormSpec,
)

FLOAT32 = BY_NAME["float32"]
PARTS = ("attention.query", "attention.key", "attention.value")
NAMES = (
    *("attention_norm", "mlp_norm", *PARTS, "attention.output", "mlp.gate", "mlp.up", "mlp.down"),
    *("moe.router", "moe.experts.gate", "moe.experts.up", "moe.experts.down"),
    *("attention.query_norm", "attention.key_norm"),
)
PLAIN: Table = {name: name for name in NAMES}
TABLES: dict[str, dict[str, str | Rule]] = {
    "same": {"attention_norm": Same("norm", leading=1)},
    "transposed": {"attention.output": Transposed("out"), "mlp.down": Transposed("down")},
    "rows": dict.fromkeys(PARTS, Rows("qkv", of=PARTS)),
    "transposed rows": dict.fromkeys(PARTS, Rows("qkv", of=PARTS, transposed=True)),
    "heads": dict.fromkeys(PARTS, Heads("qkv")),
    "each": {
        "attention.query_norm": Each("norms.{index}"),
        "moe.experts.up": Each("experts.{index}"),
    },
    "stack": {
        "moe.experts.gate": ExpertStack("gate_up", part=0, parts=2),
        "moe.experts.up": ExpertStack("gate_up", part=1, parts=2),
        "moe.experts.down": ExpertStack("down"),
    },
}


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    kv_heads, group, width = draw(st.tuples(*[st.integers(1, 3)] * 3))
    norm = NormSpec(eps=1e-5)
    bias = draw(st.booleans())
    attention = AttentionSpec(
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=2 * width,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=QkNormSpec(norm=norm, span="heads"),
    )
    mlp = MlpSpec(hidden=draw(st.integers(1, 5)), bias=bias)
    moe = MoeSpec(
        experts=draw(st.integers(1, 3)),
        experts_per_token=1,
        hidden=draw(st.integers(1, 4)),
        bias=bias,
    )
    return ModelSpec(
        name="drawn",
        model_type="any",
        num_layers=2,
        hidden=draw(st.integers(1, 5)),
        vocab=3,
        max_length=8,
        embedding=EmbeddingSpec(dim=1),
        blocks=(
            BlockSpec(attention=attention, norm=norm, mlp=mlp),
            BlockSpec(attention=attention, norm=norm, moe=moe),
        ),
        cycle=((0, 1), (1, 1)),
        head=HeadSpec(norm=norm),
    )


@pytest.mark.parametrize("name", TABLES)
@given(spec=models(), data=st.data())
def test_a_rule_is_a_view_both_ways(name: str, spec: ModelSpec, data: st.DataObject) -> None:
    ends = {n: n for n in ("token", "norm", "logits", "project_in", "project_out")}
    weights = WeightMap(
        embedding={n: f"e.{n}" for n in ends},
        block={**PLAIN, **TABLES[name]},
        head={n: f"h.{n}" for n in ends},
        layers="layers.{layer}.",
    )
    table = resolve(weights, spec)
    logical: dict[str, Raw] = {}
    at = 0
    for tensor, located in table.tensors.items():
        count = math.prod(located.shape)
        logical[tensor] = np.arange(at, at + count, dtype=FLOAT32.raw).reshape(located.shape)
        at += count
    stored = {
        key: scatter(parts, FLOAT32, lambda tensor, start, stop: logical[tensor][start:stop])
        for key, parts in table.stored.items()
    }
    # nothing is lost and nothing stands twice
    assert sorted(np.concatenate([s.reshape(-1) for s in stored.values()])) == list(range(at))
    for tensor, located in table.tensors.items():
        read = gather(
            located.pieces, located.shape, whole(located.shape), FLOAT32, stored.__getitem__
        )
        assert np.array_equal(read, logical[tensor])
        bounds = tuple(
            tuple(sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))))
            for size in located.shape
        )
        part = gather(located.pieces, located.shape, bounds, FLOAT32, stored.__getitem__)
        assert np.array_equal(part, logical[tensor][tuple(slice(a, b) for a, b in bounds)])
