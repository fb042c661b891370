"""A weight's gradient onto the step's float32 sum: in one product, and as product and sum.

    python benchmarks/weight_sums.py          # on a machine with a GPU

Prints microseconds for the products of a Llama block and for the rows of its token table, both ways
beside each other, and how far both are from the sum in float64.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from tutti.accelerator.products import add_product
from tutti.accelerator.reference.linear import _add_rows
from tutti.accelerator.torch_operators import _table_gradient

SHAPES = {
    "1B qkv": (4096, 3072, 2048),
    "1B gate and up": (4096, 16384, 2048),
    "1B down": (4096, 2048, 8192),
    "8B gate and up": (8192, 28672, 4096),
}
TABLES = {"1B token": (4096, 128256, 2048), "8B token": (8192, 128256, 4096)}


def microseconds(run: Callable[[], object], times: int = 20) -> float:
    """Return the median time of a call on the device."""
    found = []
    for _ in range(times + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(1e3 * begin.elapsed_time(end))
    return statistics.median(found[3:])


def line(name: str, apart: Callable[[], object], fused: Callable[[], object]) -> None:
    before, after = microseconds(apart), microseconds(fused)
    print(f"{name:16} apart {before:8.0f} us   straight {after:8.0f} us   {before / after:.2f}x")


def main() -> None:
    torch.manual_seed(0)
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    for name, (tokens, out, wide) in SHAPES.items():
        rows, x = torch.randn(tokens, out, **bf16), torch.randn(tokens, wide, **bf16)
        total = torch.zeros(out, wide, device="cuda")
        line(
            name,
            lambda rows=rows, x=x, total=total: total.add_(rows.t() @ x),
            lambda rows=rows, x=x, total=total: add_product(total, rows.t(), x),
        )
        total.fill_(3.0)
        add_product(total, rows.t(), x)
        exact = (rows[:, :64].t().double() @ x.double()) + 3.0
        rounded = 3.0 + (rows[:, :64].t() @ x).double()
        print(f"{'':16} error {(total[:64] - exact).norm() / exact.norm():.1e}, "
              f"apart {(rounded - exact).norm() / exact.norm():.1e}")  # fmt: skip
    for name, (tokens, vocabulary, wide) in TABLES.items():
        ids = torch.randint(0, vocabulary, (tokens,), device="cuda")
        rows = torch.randn(tokens, wide, **bf16)
        total, table = torch.zeros(vocabulary, wide, device="cuda"), torch.empty(1, **bf16)
        table = table.expand(vocabulary, wide)
        line(
            name,
            lambda ids=ids, rows=rows, total=total, table=table: total.add_(
                _table_gradient(ids, rows, table)
            ),
            lambda ids=ids, rows=rows, total=total: _add_rows(total, ids, rows),
        )


if __name__ == "__main__":
    main()
