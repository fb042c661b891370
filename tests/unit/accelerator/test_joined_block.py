"""A block that runs in one pass gives what its operators give one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from tutti.accelerator import prepared  # noqa: E402
from tutti.accelerator.host.block import MOST_ROWS, DenseBlock, refusal  # noqa: E402
from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.accelerator.paged_segments import PagedSegments  # noqa: E402
from tutti.accelerator.prepared import blocks_of, panels_of  # noqa: E402
from tutti.models import Activation  # noqa: E402

SERVING = Operators("cpu", forced={}).as_serving()


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a drawn call looks like."""

    rows: int
    width: int
    groups: int
    share: int
    dim: int
    hidden: int
    turned: int  # of a head's dimensions
    page: int
    longest: int
    interleaved: bool
    normed: bool
    window: int | None
    kind: str
    added: bool
    queries: int  # tokens of a row, at most
    seed: int


SHAPES = st.builds(
    Shape,
    rows=st.integers(1, 25),
    width=st.sampled_from([16, 40, 64]),
    groups=st.integers(1, 3),
    share=st.integers(1, 5),
    dim=st.sampled_from([16, 32, 48, 64]),
    hidden=st.sampled_from([24, 64, 96]),
    turned=st.sampled_from([4, 8]),
    page=st.sampled_from([1, 4, 16]),
    longest=st.integers(1, 50),
    interleaved=st.booleans(),
    normed=st.booleans(),
    window=st.sampled_from([None, 1, 7]),
    kind=st.sampled_from(["sliding", "chunked"]),
    added=st.booleans(),
    queries=st.integers(1, 4),
    seed=st.integers(0, 1 << 20),
)


def call(shape: Shape, dtype: Any) -> dict[str, Any]:
    """Return a block and what it is given, of drawn numbers."""
    drawn = torch.Generator().manual_seed(shape.seed)

    def numbers(*sizes: int, scale: float = 1.0) -> Any:
        return (scale * torch.randn(sizes, generator=drawn)).to(dtype)

    heads, dim = shape.groups * shape.share, shape.dim
    scale = shape.width**-0.5
    weights = {
        "qkv": numbers((heads + 2 * shape.groups) * dim, shape.width, scale=scale),
        "output": numbers(shape.width, heads * dim, scale=(heads * dim) ** -0.5),
        "up": numbers(2 * shape.hidden, shape.width, scale=scale),
        "down": numbers(shape.width, shape.hidden, scale=shape.hidden**-0.5),
    }
    block = DenseBlock(
        norms=(numbers(shape.width), numbers(shape.width)),
        head_norms=(numbers(dim), numbers(dim)) if shape.normed else None,
        heads=heads, eps=1e-5, unit_offset=False, interleaved=shape.interleaved, scale=dim**-0.5,
        window=shape.window, window_kind=shape.kind, **weights,
    )  # fmt: skip
    keys = torch.randint(1, shape.longest + 1, (shape.rows,), generator=drawn).tolist()
    wanted = torch.randint(1, shape.queries + 1, (shape.rows,), generator=drawn).tolist()
    counts = [min(pair) for pair in zip(wanted, keys, strict=True)]
    tokens = sum(counts)
    each = -(-shape.longest // shape.page)
    order = torch.randperm(shape.rows * each, generator=drawn) + 1
    steps = PagedSegments.of(counts, keys, order.view(shape.rows, each).tolist(), shape.page)
    row_t, position_t = steps.rows_and_positions()
    pages = (shape.rows * each + 1, shape.page, shape.groups, dim)
    angles = torch.rand(tokens, shape.turned // 2, generator=drawn)
    return {
        "x": numbers(tokens, shape.width),
        "added": numbers(tokens, shape.width) if shape.added else None,
        "block": block,
        "cos": angles.cos(),
        "sin": angles.sin(),
        "key_pages": numbers(*pages),
        "value_pages": numbers(*pages),
        "places": steps.places(row_t, position_t),
        "steps": steps,
    }


def one_by_one(given: dict[str, Any]) -> tuple[Any, Any]:
    """Return what the operators make of it, in float32 or wider."""
    plain, block = Operators("cpu", forced={}), given["block"]
    x, added = given["x"], given["added"]
    normed, x = plain.add_rms_norm(
        x if added is None else added, None if added is None else x, block.norms[0], eps=block.eps
    )
    kv_heads, dim = given["key_pages"].shape[2:]
    heads = plain.linear(normed, block.qkv).unflatten(1, (-1, dim))
    norms = block.head_norms or (None, None)
    q = plain.store_heads(
        heads, given["cos"], given["sin"], given["key_pages"], given["value_pages"],
        given["places"], heads=block.heads, kv_heads=kv_heads, interleaved=block.interleaved,
        query_norm=norms[0], key_norm=norms[1], eps=block.eps,
    )  # fmt: skip
    y = plain.paged_attention(
        q, given["key_pages"], given["value_pages"], given["steps"], scale=block.scale,
        window=block.window, window_kind=block.window_kind,
    )  # fmt: skip
    y = plain.linear(y.flatten(1), block.output)
    normed, x = plain.add_rms_norm(y, x, block.norms[1], eps=block.eps)
    gated = plain.gated_activation(plain.linear(normed, block.up), kind=Activation.SILU)
    return x, plain.linear(gated, block.down)


def compared(shape: Shape, dtype: Any, tolerance: float, *, blocks: bool = False) -> None:
    with torch.no_grad():
        own, other = call(shape, dtype), call(shape, dtype)
        for name, value in other.items():
            if isinstance(value, torch.Tensor) and value.dtype is dtype:
                other[name] = value.double()
        weights = {
            field.name: getattr(other["block"], field.name)
            for field in dataclasses.fields(DenseBlock)
            if field.name != "kept"
        }
        wide = {
            name: tuple(w.double() for w in value) if isinstance(value, tuple)
            else value.double() if isinstance(value, torch.Tensor) else value
            for name, value in weights.items()
        }  # fmt: skip
        expected = one_by_one({**other, "block": DenseBlock(**wide)})
        for weight in own["block"].weights:
            SERVING.prepare(weight)
            assert (blocks_of(weight) is not None) == blocks
            assert blocks or panels_of(weight, now=True) is not None
        found = SERVING.joined_block(*own.values())
        assert found is not None
        for name, made, wanted in (
            ("stream", found[0], expected[0]),
            ("added", found[1], expected[1]),
            ("keys", own["key_pages"], other["key_pages"]),
            ("values", own["value_pages"], other["value_pages"]),
        ):
            apart = float((made.double() - wanted).abs().max())
            assert apart <= tolerance * max(1.0, float(wanted.abs().max())), (name, apart)


@given(SHAPES)
@settings(deadline=None)
def test_float32(shape: Shape) -> None:
    compared(shape, torch.float32, 2e-5)


@given(SHAPES)
@settings(deadline=None)
def test_bfloat16(shape: Shape) -> None:
    if prepared.host_multiplies(torch.bfloat16):
        pytest.skip("weights lie in blocks here: the next test")
    compared(shape, torch.bfloat16, 4e-2)


def test_hosts_that_multiply_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are oneDNN's there; between them it is one loop after the other."""
    monkeypatch.setattr(prepared, "host_multiplies", lambda _: True)

    @given(SHAPES)
    @settings(deadline=None, max_examples=20)
    def check(shape: Shape) -> None:
        compared(shape, torch.bfloat16, 4e-2, blocks=True)

    check()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rows": MOST_ROWS + 1}, "rows of few tokens"),
        ({"dim": 24}, "heads as wide as"),
    ],
)
def test_others_run_one_by_one(change: dict[str, Any], why: str) -> None:
    shape = Shape(3, 16, 1, 2, 16, 24, 4, 4, 9, False, False, None, "sliding", False, 1, 0)
    given = call(dataclasses.replace(shape, **change), torch.float32)
    order = (given["x"], given["block"], given["key_pages"], given["value_pages"], given["steps"])
    with torch.no_grad():
        told = refusal(*order)
        assert told is not None
        assert why in told


def test_weights_that_changed_are_read_anew() -> None:
    shape = Shape(3, 16, 1, 2, 16, 24, 4, 4, 9, False, False, None, "sliding", True, 1, 0)
    given = call(shape, torch.float32)
    with torch.no_grad():
        for factor in (1.0, 2.0):
            given["block"].norms[1].mul_(factor)
            given["block"].down.mul_(factor)
            for weight in given["block"].weights:
                SERVING.prepare(weight)
                panels_of(weight, now=True)
            expected = one_by_one(given)
            found = SERVING.joined_block(*given.values())
            assert found is not None
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_named_operators_are_not_passed_over() -> None:
    assert SERVING.joins_blocks()
    assert not Operators("cpu", forced={}).joins_blocks()
    for operator in ("linear", "paged_attention"):
        named = Operators("cpu", forced={operator: "reference"}).as_serving()
        assert not named.joins_blocks()
