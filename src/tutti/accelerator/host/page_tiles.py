"""Queries that share keys against a page of them, as vectors: products, and weighted values.

Keys and values are floats, or the bits of bfloat16, which are widened as they are read. Widths of
heads are multiples of 16; `paged_kernels` has loops for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils, errors
from numba.extending import intrinsic

from tutti.accelerator.host.tiles import (
    _LANES,
    _PLACE,
    _WIDE,
    _everywhere,
    _stored,
    _widened,
    fetched,
    fused,
    moved,
    summed,
)


def _constant(value: Any, name: str) -> int:
    if not isinstance(value, types.IntegerLiteral):
        raise errors.RequireLiteralValue(name)
    return int(value.literal_value)


def _vector_at(builder: Any, pointer: Any, kind: Any) -> Any:
    """Return the vector of stored numbers at a place, widened."""
    vector = ir.VectorType(_stored(kind), _LANES)
    size = 4 if kind == types.float32 else 2
    numbers = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=size)
    return _widened(builder, numbers, kind)


def _products_tile(
    _context: Any, q: Any, width: Any, keys: Any, apart: Any, ahead: Any, out: Any, row: Any,
    heads: Any, count: Any,
) -> Any:  # fmt: skip
    """Write the products of queries with a few keys: out (heads, …), `row` apart.

    Queries lie `width` apart, keys `apart`, and those that are read next `ahead` of these. `heads`
    and `count` (of keys) are constants.
    """
    del width, apart, ahead, row  # these are types, and the types of numbers are known
    num_heads, num_keys = _constant(heads, "heads"), _constant(count, "count")
    kind = keys.dtype
    signature = types.void(
        q, types.intp, keys, types.intp, types.intp, out, types.intp, heads, count
    )

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        own_q, own_width, own_keys, own_apart, own_ahead, own_out, own_row, *_ = given
        lines = builder.bitcast(own_keys, _stored(kind).as_pointer())
        queries = [moved(builder, own_q, own_width, n) for n in range(num_heads)]
        places = [moved(builder, lines, own_apart, n) for n in range(num_keys)]

        def add(at: Any, sums: Sequence[Any]) -> list[Any]:
            read = [_vector_at(builder, builder.gep(place, [at]), kind) for place in places]
            for place in places:
                fetched(builder, builder.gep(builder.gep(place, [own_ahead]), [at]))
            made = []
            for n, query in enumerate(queries):
                own = _vector_at(builder, builder.gep(query, [at]), types.float32)
                pairs = zip(read, sums[n * num_keys : (n + 1) * num_keys], strict=True)
                made += [fused(builder, own, key, total) for key, total in pairs]
            return made

        none = [ir.Constant(_WIDE, [0.0] * _LANES)] * (num_heads * num_keys)
        added = summed(builder, none, _LANES, own_width, add)
        whole = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.FloatType(), [ir.FloatType(), _WIDE]),
            f"llvm.vector.reduce.fadd.v{_LANES}f32",
        )
        nothing = ir.Constant(ir.FloatType(), 0.0)
        for n in range(num_heads):
            line = moved(builder, own_out, own_row, n)
            for k in range(num_keys):
                total = builder.call(
                    whole, [nothing, added[n * num_keys + k]], fastmath=("reassoc",)
                )
                builder.store(total, builder.gep(line, [ir.Constant(_PLACE, k)]))
        return context.get_dummy_value()

    return signature, generate


def _values_tile(
    _context: Any, weights: Any, row: Any, values: Any, apart: Any, ahead: Any, count: Any,
    out: Any, width: Any, heads: Any, columns: Any,
) -> Any:  # fmt: skip
    """Add weighted values to what queries have: some vectors (`columns`) of each.

    `count` values lie `apart`, and those that are read next `ahead` of these; weights of the next
    query lie `row` further on, its sums `width`.
    """
    del row, apart, ahead, count, width
    num_heads, num_columns = _constant(heads, "heads"), _constant(columns, "columns")
    kind = values.dtype
    signature = types.void(
        weights,
        types.intp,
        values,
        types.intp,
        types.intp,
        types.intp,
        out,
        types.intp,
        heads,
        columns,
    )

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        own_weights, own_row, own_values, own_apart, own_ahead, own_count = given[:6]
        own_out, own_width = given[6:8]
        lines = builder.bitcast(own_values, _stored(kind).as_pointer())
        weighing = [moved(builder, own_weights, own_row, n) for n in range(num_heads)]
        steps = [ir.Constant(_PLACE, _LANES * c) for c in range(num_columns)]
        lots = [moved(builder, own_out, own_width, n) for n in range(num_heads)]
        parts = [builder.gep(own, [step]) for own in lots for step in steps]

        def add(at: Any, sums: Sequence[Any]) -> list[Any]:
            line = builder.gep(lines, [builder.mul(at, own_apart)])
            read = [_vector_at(builder, builder.gep(line, [step]), kind) for step in steps]
            behind = builder.gep(line, [own_ahead])
            for step in steps[:: 1 if kind == types.float32 else 2]:
                fetched(builder, builder.gep(behind, [step]))
            made = []
            for n, weight in enumerate(weighing):
                number = _everywhere(builder, builder.load(builder.gep(weight, [at])))
                pairs = zip(read, sums[n * num_columns : (n + 1) * num_columns], strict=True)
                made += [fused(builder, number, value, total) for value, total in pairs]
            return made

        begun = [_vector_at(builder, part, types.float32) for part in parts]
        added = summed(builder, begun, 1, own_count, add)
        for part, new in zip(parts, added, strict=True):
            builder.store(new, builder.bitcast(part, _WIDE.as_pointer()), align=4)
        return context.get_dummy_value()

    return signature, generate


products_tile: Any = intrinsic(_products_tile)
values_tile: Any = intrinsic(_values_tile)
