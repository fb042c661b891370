"""What a block is made of: products, norms and rotations, each once, for whoever counts them.

Operators with their FLOPs and bytes, the calls that the engine makes, parameters and the closed
formulas of the cost model all go over these. Widths are numbers of one model, or arrays
of many models and strategies; what a model does not have is 0.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from tutti.models.parts import AttentionSpec, BlockSpec, Placement, Residual

Size = Any  # a number, or an array of them
Widths = Any  # `BlockWidths`, or arrays of them under the same names


class Sliced(Enum):
    """How tensor parallelism slices a weight, and so what of its input a rank has."""

    COLUMNS = "columns"  # the input is whole, and gathered where ranks hold parts of it
    ROWS = "rows"  # the input is sliced
    NOT = "not"  # every rank has the weight, and takes the tokens that are its own


class BlockWidths(NamedTuple):
    """The widths of one block."""

    hidden: int
    heads: int
    kv_heads: int
    d_qk: int  # of a query or key head
    d_v: int
    ffn: int  # of the dense feed-forward layer
    gated: bool
    experts: int
    topk: int
    expert_ffn: int
    shared_ffn: int
    q_lora: int  # ranks of latent attention
    kv_lora: int
    rope_dim: int

    @classmethod
    def of(cls, block: BlockSpec, hidden: int) -> BlockWidths:
        """Return the widths of a block of a model with so many hidden features."""
        part, latent, mlp, moe = block.attention, block.attention.latent, block.mlp, block.moe
        return cls(
            hidden=hidden,
            heads=part.heads,
            kv_heads=part.kv_heads,
            d_qk=part.head_dim,
            d_v=part.value_dim,
            ffn=mlp.hidden if mlp is not None else 0,
            gated=mlp.gated if mlp is not None else moe is None or moe.gated,
            experts=moe.experts if moe is not None else 0,
            topk=moe.experts_per_token if moe is not None else 0,
            expert_ffn=moe.hidden if moe is not None else 0,
            shared_ffn=moe.shared_hidden if moe is not None else 0,
            q_lora=(latent.query_rank or 0) if latent is not None else 0,
            kv_lora=latent.kv_rank if latent is not None else 0,
            rope_dim=latent.rope_dim if latent is not None else 0,
        )


class Product(NamedTuple):
    """A product of tokens with a weight, as one rank computes it."""

    name: str
    reads: str  # which tensor; products that read the same one keep it once
    columns: Size
    depth: Size
    sliced: Sliced
    present: Size = True  # which models have it
    norm: str = ""  # the norm that what it reads passes first


def rank_kv_heads(kv_heads: Size, tp: Size) -> Size:
    """Return the key-value heads of a rank; where there are fewer than ranks, ranks share one."""
    share = kv_heads / tp
    return share * (share >= 1) + (share < 1)


def block_norm_names(block: BlockSpec) -> tuple[str, ...]:
    """Return the names of a block's norms on the residual stream, in the order of their use."""
    if block.residual is Residual.PARALLEL_ONE_NORM:
        return ("attention_norm",)
    if block.placement is Placement.SANDWICH:
        return ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
    if block.placement is Placement.PRE:
        return ("attention_norm", "mlp_norm")
    return ("attention_post_norm", "mlp_post_norm")


def rotated_heads(part: AttentionSpec, tp: Size = 1) -> tuple[Size, ...]:
    """Return the heads of a rank that turn by their positions, those together that turn at once.

    Latent attention has one key for all heads, which turns by itself.
    """
    if part.rotary is None:
        return ()
    heads = part.heads / tp
    if part.latent is not None:
        return heads, 1.0 + 0.0 * heads
    return (heads + rank_kv_heads(part.kv_heads, tp),)


def attention_products(widths: Widths, tp: Size = 1) -> list[Product]:
    """Return the products around attention, the way out last: plain, or through latents."""
    w, source, heads = widths, "attention input", widths.heads / tp
    plain, queries, products = w.kv_lora == 0, heads * w.d_qk, []
    if _some(plain):
        columns = queries + rank_kv_heads(w.kv_heads, tp) * (w.d_qk + w.d_v)
        products += [Product("attention.qkv", source, columns, w.hidden, Sliced.COLUMNS, plain)]
    if not _all(plain):
        latent, ranked = w.kv_lora > 0, (w.kv_lora > 0) & (w.q_lora > 0)
        direct, down = latent & (w.q_lora == 0), w.kv_lora + w.rope_dim
        keys = heads * (w.d_qk - w.rope_dim + w.d_v)

        def up(name: str, columns: Size, rank: Size, present: Size) -> Product:
            reads, norm = f"attention.{name}_up input", f"attention.{name}_latent_norm"
            args = (columns, rank, Sliced.COLUMNS, present)
            return Product(f"attention.{name}_up", reads, *args, norm)

        every = (
            Product("attention.query", source, queries, w.hidden, Sliced.COLUMNS, direct),
            Product("attention.query_down", source, w.q_lora, w.hidden, Sliced.NOT, ranked),
            up("query", queries, w.q_lora, ranked),
            Product("attention.kv_down", source, down, w.hidden, Sliced.NOT, latent),
            up("kv", keys, w.kv_lora, latent),
        )
        products += [product for product in every if _some(product.present)]
    read = "attention.output input"
    return [*products, Product("attention.output", read, w.hidden, heads * w.d_v, Sliced.ROWS)]


def feed_forward_products(
    name: str, hidden: Size, width: Size, gated: Size, *, tp: Size = 1, reads: str = "mlp input"
) -> tuple[Product, Product]:
    """Return the ways into and out of a feed-forward layer, or one expert."""
    width = width / tp
    up = f"{name}.gate_up" if _some(gated) else f"{name}.up"
    return (
        Product(up, reads, width * (1 + gated), hidden, Sliced.COLUMNS),
        Product(f"{name}.down", f"{name}.down input", hidden, width, Sliced.ROWS),
    )


def router_product(hidden: Size, experts: Size) -> Product:
    """Return what scores the experts."""
    return Product("moe.router", "mlp input", experts, hidden, Sliced.NOT)


def _some(given: Size) -> bool:
    """Tell whether a flag is set, for one model at least."""
    return bool(given if isinstance(given, bool) else given.any())


def _all(given: Size) -> bool:
    """Tell whether a flag is set for every model."""
    return bool(given if isinstance(given, bool) else given.all())
