"""The names that a Plan's collective choices may use: operations, and algorithms of each.

The programs themselves are made in `collective`, which a test holds against this table.
"""

from __future__ import annotations

AUTO = "auto"  # the cost model decides anew for every group

_GATHER = ("native", "ring", "doubling", "direct", "hierarchical", "leader")
_BROADCAST = ("native", "tree", "binary", "ring", "direct", "hierarchical", "leader")
_SCATTER = ("native", "tree", "direct", "leader")

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": (*_GATHER, "tree", "double_tree", "proportional"),
    "reduce_scatter": _GATHER,
    "all_gather": _GATHER,
    "broadcast": (*_BROADCAST, "scatter_gather"),
    "reduce": _BROADCAST,
    "gather": _SCATTER,
    "scatter": _SCATTER,
    "all_to_all": ("native", "direct", "rail"),
    "barrier": ("native", "tree", "leader"),
    "send_receive": ("direct",),
}
