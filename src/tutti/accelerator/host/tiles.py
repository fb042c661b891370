"""Products of few rows with weights that lie in panels: tiles in registers, written as vectors.

A panel is 32 outputs of a weight, input by input, in the format in which the weight is kept; its
numbers are widened as they are read, and added up in float32. A tile is up to `MOST` rows times a
panel: its sums stay in registers while the panel passes by once. Compilers do not find that by
themselves, so the loop is said to LLVM, which knows how wide the processor's own vectors are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils, errors
from numba.extending import intrinsic

PANEL = 32  # outputs
MOST = 12  # rows of a tile: with 24 sums of 16 numbers each, of 32 registers
_LANES = 16
_WIDE = ir.VectorType(ir.FloatType(), _LANES)
_PLACE = ir.IntType(64)


def _stored(kind: Any) -> Any:
    """Return how a panel's numbers lie in memory: floats, halves, or the bits of bfloat16."""
    if kind == types.float32:
        return ir.FloatType()
    return ir.HalfType() if kind == types.int16 else ir.IntType(16)


def _widened(builder: Any, numbers: Any, kind: Any) -> Any:
    """Return a vector of stored numbers as floats."""
    if kind == types.float32:
        return numbers
    if kind == types.int16:
        return builder.fpext(numbers, _WIDE)
    bits = ir.VectorType(ir.IntType(32), _LANES)
    upper = builder.shl(builder.zext(numbers, bits), ir.Constant(bits, [16] * _LANES))
    return builder.bitcast(upper, _WIDE)


def _everywhere(builder: Any, number: Any) -> Any:
    """Return a vector of one number."""
    none, lanes = ir.Constant(_WIDE, ir.Undefined), ir.VectorType(ir.IntType(32), _LANES)
    one = builder.insert_element(none, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, none, ir.Constant(lanes, [0] * _LANES))


def fetched(builder: Any, pointer: Any) -> None:
    """Let the line at a place come nearer, for who reads it soon; any place will do."""
    byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    name = "llvm.prefetch.p0i8" if "i8*" in str(byte) else "llvm.prefetch.p0"
    kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
    fetch = cgutils.get_or_insert_function(builder.module, kind, name)
    to_read, keep, data = (ir.Constant(flag, number) for number in (0, 2, 1))
    builder.call(fetch, [builder.bitcast(pointer, byte), to_read, keep, data])


def moved(builder: Any, pointer: Any, step: Any, count: int) -> Any:
    """Return the place `count` steps further on."""
    return builder.gep(pointer, [builder.mul(step, ir.Constant(_PLACE, count))])


def _part(builder: Any, pointer: Any, half: int) -> Any:
    """Return where one half of a line of a panel, or of sums, begins."""
    return builder.gep(pointer, [ir.Constant(_PLACE, _LANES * half)])


def summed(builder: Any, begun: Sequence[Any], step: int, end: Any, add: Any) -> list[Any]:
    """Write a loop over 0, `step`, … below `end` that adds to vectors; return these behind it.

    `add` writes what happens at a place, given it and the sums so far, and returns the new ones.
    """
    before, loop = builder.block, builder.append_basic_block("loop")
    after = builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    at = builder.phi(_PLACE)
    sums = [builder.phi(_WIDE) for _ in begun]
    added: list[Any] = add(at, sums)
    following = builder.add(at, ir.Constant(_PLACE, step))
    at.add_incoming(ir.Constant(_PLACE, 0), before)
    at.add_incoming(following, loop)
    for own, first, new in zip(sums, begun, added, strict=True):
        own.add_incoming(first, before)
        own.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following, end), loop, after)
    builder.position_at_end(after)
    return added


def fused(builder: Any, one: Any, two: Any, total: Any) -> Any:
    """Return one · two + total of vectors, rounded once."""
    kind, name = ir.FunctionType(_WIDE, [_WIDE] * 3), f"llvm.fma.v{_LANES}f32"
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, name), [one, two, total]
    )


def _tile(
    _context: Any, x: Any, wide: Any, panel: Any, depth: Any, out: Any, row: Any, rows: Any
) -> Any:
    """Write x (rows, depth) times a panel (depth, 32) to out.

    `wide`, `row`: numbers from one row of x, and of out, to the next. `rows` is a constant.
    """
    if not isinstance(rows, types.IntegerLiteral):
        raise errors.RequireLiteralValue("rows")
    del wide, depth, row  # these are types, and the types of numbers are known
    count, kind = rows.literal_value, panel.dtype
    signature = types.void(x, types.intp, panel, types.intp, out, types.intp, rows)

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        own_x, own_wide, own_panel, own_depth, own_out, own_row, _ = given
        stored = _stored(kind)
        vector = ir.VectorType(stored, _LANES).as_pointer()
        lines = builder.bitcast(own_panel, stored.as_pointer())
        begins = [moved(builder, own_x, own_wide, n) for n in range(count)]

        def add(at: Any, sums: Sequence[Any]) -> list[Any]:
            line = builder.gep(lines, [builder.mul(at, ir.Constant(_PLACE, PANEL))])
            behind = moved(builder, line, own_depth, PANEL)
            for half in range(2 if kind == types.float32 else 1):
                fetched(builder, _part(builder, behind, half))  # the next panel
            places = [builder.bitcast(_part(builder, line, half), vector) for half in range(2)]
            weights = [_widened(builder, builder.load(place, align=2), kind) for place in places]
            added = []
            for n, begin in enumerate(begins):
                number = _everywhere(builder, builder.load(builder.gep(begin, [at])))
                pairs = zip(weights, sums[2 * n : 2 * n + 2], strict=True)
                added += [fused(builder, number, weight, total) for weight, total in pairs]
            return added

        nothing = [ir.Constant(_WIDE, [0.0] * _LANES)] * (2 * count)
        found = summed(builder, nothing, 1, own_depth, add)
        for n in range(count):
            to = moved(builder, own_out, own_row, n)
            for half in range(2):
                place = builder.bitcast(_part(builder, to, half), _WIDE.as_pointer())
                builder.store(found[2 * n + half], place, align=4)
        return context.get_dummy_value()

    return signature, generate


def _place_of(_context: Any, array: Any, number: Any) -> Any:
    """Return where a number of an array without gaps lies."""
    del number
    signature = types.CPointer(array.dtype)(array, types.intp)

    def generate(context: Any, builder: Any, own: Any, given: Any) -> Any:
        made = context.make_array(own.args[0])(context, builder, given[0])
        return builder.gep(made.data, [given[1]])

    return signature, generate


tile: Any = intrinsic(_tile)
place_of: Any = intrinsic(_place_of)


def _panel_product(x: Any, rows: int, panels: Any, number: int, out: Any) -> None:
    """Write the outputs of one panel for some rows of x.

    Tiles have an even number of rows, or one: x and out have room for one row more, which is
    computed where rows are odd, and is nobody's.
    """
    depth, wide, row = panels.shape[1], x.shape[1], out.shape[1]
    panel = place_of(panels, number * depth * PANEL)
    done = 0
    while done < rows:
        left = rows - done
        tiles = (left + MOST - 1) // MOST
        each = (left + tiles - 1) // tiles
        own, to = place_of(x, done * wide), place_of(out, done * row + number * PANEL)
        if each > 10:
            tile(own, wide, panel, depth, to, row, 12)
            done += 12
        elif each > 8:
            tile(own, wide, panel, depth, to, row, 10)
            done += 10
        elif each > 6:
            tile(own, wide, panel, depth, to, row, 8)
            done += 8
        elif each > 4:
            tile(own, wide, panel, depth, to, row, 6)
            done += 6
        elif each > 2:
            tile(own, wide, panel, depth, to, row, 4)
            done += 4
        elif each == 2:
            tile(own, wide, panel, depth, to, row, 2)
            done += 2
        else:
            tile(own, wide, panel, depth, to, row, 1)
            done += 1


def compiled(function: Any, *, parallel: bool = False) -> Any:
    """Return a compiled function, kept on disk where there is a place for it."""
    options: dict[str, Any] = {"error_model": "numpy", "parallel": parallel}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to keep it in
        return numba.njit(**options)(function)


panel_product = compiled(_panel_product)


def _linear(x: Any, rows: int, panels: Any, out: Any) -> None:
    """Write x times a weight, for as many rows; x and out have one more."""
    for number in numba.prange(panels.shape[0]):
        panel_product(x, rows, panels, number, out)


linear = compiled(_linear), compiled(_linear, parallel=True)  # for one thread and for several
