"""Builds operators with the arithmetic of their FLOPs, traffic and kept tensors.

Conventions, e = element bytes. A gemm reads both operands and writes the result; its backward is
two gemms of the same size. A norm reads and writes once, and its backward reads gradient and input
and writes the gradient. Gate and up, and query, key and value, are one product each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tutti.models.anatomy import Product, Sliced
from tutti.models.operators import AttentionShape, Kept, Operator, OperatorKind, Work, Workload

MASK_BYTES = 1  # of one element of a dropout mask
FLOAT_BYTES = 4


@dataclass(slots=True)
class Builder:
    """Collects the operators of a unit in the order of their execution."""

    work: Workload
    operators: list[Operator] = field(default_factory=list)
    prefix: str = ""
    known: set[str] = field(default_factory=set)  # tensors that a product keeps already

    def product(self, product: Product, *, rows: int | None = None, count: int = 1) -> None:
        """Add a product of the block, over the rank's tokens or the `rows` of its experts.

        It keeps what it reads, unless another product does: where that is whole on every rank, the
        rank's own part of it.
        """
        own, tokens = self.work.own_tokens, self.work.tokens
        m = rows or (own if product.sliced is Sliced.NOT else tokens)
        held = rows or (tokens if product.sliced is Sliced.ROWS else own)
        n, k, name = int(product.columns), int(product.depth), product.reads
        kept = () if name in self.known else (self.keep(name, held * k),)
        self.known.add(name)
        self.gemm(product.name, m, n, k, kept=kept, count=count)

    def gemm(
        self, name: str, m: int, n: int, k: int, *, kept: tuple[Kept, ...] = (), count: int = 1
    ) -> None:
        """Add a product with a weight of k × n; `count` above one: so many experts share m rows."""
        e = self.work.element_bytes
        traffic = e * (m * k + count * k * n + m * n)
        work = Work(flops=2.0 * m * n * k, traffic_bytes=traffic)
        self._add(
            name,
            OperatorKind.GROUPED_GEMM if count > 1 else OperatorKind.GEMM,
            forward=work,
            backward_input=work,
            backward_weight=work,
            m=m,
            n=n,
            k=k,
            count=count,
            weight_bytes=e * count * k * n,
            kept=kept,
        )

    def forward_gemm(self, name: str, m: int, n: int, k: int) -> None:
        """Add a product that has no backward."""
        traffic = self.work.element_bytes * (m * k + k * n + m * n)
        work = Work(flops=2.0 * m * n * k, traffic_bytes=traffic)
        self._add(name, OperatorKind.GEMM, forward=work, m=m, n=n, k=k)

    def batched_gemm(
        self, name: str, count: int, m: int, n: int, k: int, *, kept: tuple[Kept, ...] = ()
    ) -> None:
        """Add `count` products of two activations; both gradients are input gradients."""
        e = self.work.element_bytes
        flops = 2.0 * count * m * n * k
        traffic = e * count * (m * k + k * n + m * n)
        self._add(
            name,
            OperatorKind.GEMM,
            forward=Work(flops=flops, traffic_bytes=traffic),
            backward_input=Work(flops=2 * flops, traffic_bytes=2 * traffic),
            m=m,
            n=n,
            k=k,
            count=count,
            kept=kept,
            core_attention=True,
        )

    def memory_bound(
        self,
        name: str,
        kind: OperatorKind,
        elements: float,
        *,
        forward: float,
        backward: float,
        kept: tuple[Kept, ...] = (),
        core: bool = False,
    ) -> None:
        """Add an operator that moves `forward` and `backward` bytes per element."""
        self._add(
            name,
            kind,
            forward=Work(traffic_bytes=forward * elements),
            backward_input=Work(traffic_bytes=backward * elements),
            elements=elements,
            kept=kept,
            core_attention=core,
        )

    def norm(self, name: str, rows: float, width: int, *, keep: bool = True) -> None:
        """Add a norm; it keeps its input."""
        e = self.work.element_bytes
        kept = (self.keep(f"{name} input", rows * width),) if keep else ()
        self.memory_bound(
            name, OperatorKind.NORM, rows * width, forward=2 * e, backward=3 * e, kept=kept
        )

    def elementwise(self, name: str, elements: float, *, inputs: int = 2) -> None:
        """Add a sum of two tensors, or with one input a multiplication with a constant."""
        e = self.work.element_bytes
        self.memory_bound(
            name,
            OperatorKind.ELEMENTWISE,
            elements,
            forward=(inputs + 1) * e,
            backward=(inputs + 1) * e,
        )

    def move(self, name: str, elements: float, *, kept: tuple[Kept, ...] = ()) -> None:
        """Add a copy of rows into another order."""
        e = self.work.element_bytes
        self.memory_bound(
            name, OperatorKind.PERMUTE, elements, forward=2 * e, backward=2 * e, kept=kept
        )

    def dropout(self, name: str, elements: float) -> None:
        """Add a dropout; it keeps its mask."""
        e = self.work.element_bytes
        self.memory_bound(
            name,
            OperatorKind.ELEMENTWISE,
            elements,
            forward=2 * e + MASK_BYTES,
            backward=2 * e + MASK_BYTES,
            kept=(Kept(name=f"{self.prefix}{name} mask", bytes=MASK_BYTES * elements),),
        )

    def activation(self, name: str, rows: int, width: int, *, gated: bool) -> None:
        """Add a non-linearity; it keeps its input, gated both halves."""
        e = self.work.element_bytes
        self.memory_bound(
            name,
            OperatorKind.ACTIVATION,
            rows * width,
            forward=(3 if gated else 2) * e,
            backward=(5 if gated else 3) * e,
            kept=(self.keep(f"{name} input", rows * width * (2 if gated else 1)),),
        )

    def attention(self, name: str, shape: AttentionShape, *, context: int) -> None:
        """Add fused attention; it keeps q, k, v and the log-sum-exp of each row.

        Its output is kept by the projection that follows. The kernel recomputes the scores in
        backward; as model FLOPs that does not count.
        """
        e = self.work.element_bytes
        queries = shape.sequences * shape.query_length * shape.heads
        keys = shape.sequences * shape.query_length * shape.kv_heads
        q, o = queries * shape.head_dim, queries * shape.value_dim
        k, v = keys * shape.head_dim, keys * shape.value_dim
        flops = 2.0 * queries * context * (shape.head_dim + shape.value_dim)
        self._add(
            name,
            OperatorKind.ATTENTION,
            forward=Work(flops=flops, traffic_bytes=e * (q + k + v + o)),
            backward_input=Work(flops=2 * flops, traffic_bytes=2 * e * (q + k + v + o)),
            attention=shape,
            elements=queries,
            core_attention=True,
            kept=(
                self.keep("query", q),
                self.keep("key", k),
                self.keep("value", v),
                Kept(
                    name=f"{self.prefix}attention log-sum-exp",
                    bytes=FLOAT_BYTES * queries,
                    core_attention=True,
                ),
            ),
        )

    def embedding(self, name: str, elements: float) -> None:
        """Add a table look-up; its backward adds rows to the table's gradient."""
        e = self.work.element_bytes
        self._add(
            name,
            OperatorKind.EMBEDDING,
            forward=Work(traffic_bytes=2 * e * elements),
            backward_weight=Work(traffic_bytes=3 * e * elements),
            elements=elements,
        )

    def keep(self, name: str, elements: float, *, core: bool = False) -> Kept:
        """Return a kept tensor of ordinary elements."""
        size = self.work.element_bytes * elements
        return Kept(name=f"{self.prefix}{name}", bytes=size, core_attention=core)

    def _add(self, name: str, kind: OperatorKind, **fields: Any) -> None:
        self.operators.append(Operator(name=f"{self.prefix}{name}", kind=kind, **fields))
