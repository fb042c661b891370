"""Which rank of the plan this process is.

Schedulers number processes node by node, a plan numbers chips stage by stage; the two orders agree
only by luck. So a process is started *for a chip*: the launch files say which node it is on
(TUTTI_NODE), LOCAL_RANK counts the chips that the plan uses there, in the order of their slots, and
the rank follows from the plan. The RANK that torchrun gives out serves its rendezvous only.
"""

from __future__ import annotations

from collections.abc import Mapping

from tutti.document import Place
from tutti.errors import InputError, hint
from tutti.hardware.slots import Slots
from tutti.hardware.topology import Position
from tutti.plan.plan import Plan

NODE = "TUTTI_NODE"
"""Its node: "pool/node", or "pool/node/slots" where a node is made of several hosts."""
ATTEMPT = "TUTTI_ATTEMPT"
"""How often the job was restarted before; set by whatever restarts it."""
_RESTARTS = (ATTEMPT, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def used_chips(plan: Plan) -> dict[Position, int]:
    """Return the rank of every chip that takes part; idle and spare ones are not here."""
    chips = (chip for _, _, stage in plan.stages() for r in stage.replicas for chip in r.chips)
    return {chip: rank for rank, chip in enumerate(chips)}


def rank_of_process(plan: Plan, environ: Mapping[str, str]) -> int:
    """Return this process's rank in the plan, from its environment.

    TUTTI_NODE and LOCAL_RANK name a chip; without TUTTI_NODE, RANK is taken as it is. Whether two
    processes claim one chip cannot be seen from here.
    """
    num_ranks = plan.num_ranks
    if "WORLD_SIZE" in environ:
        world = _number(environ, "WORLD_SIZE")
        if world != num_ranks:
            raise InputError(
                f"WORLD_SIZE is {world}, but the plan has {num_ranks} ranks; start every node "
                "that `tutti launch` lists, with as many processes as it says"
            )
    if NODE in environ:
        return _rank_at(plan, environ[NODE], _number(environ, "LOCAL_RANK"))
    if "RANK" not in environ and num_ranks == 1:
        return 0
    rank = _number(environ, "RANK")
    if rank >= num_ranks:
        raise InputError(f"RANK is {rank}, but the plan has {num_ranks} ranks, counted from 0")
    return rank


def device_index(environ: Mapping[str, str], slot: int) -> int:
    """Return which of the devices that this process sees is its chip.

    The files of `tutti launch` show a host's processes their chips only, in the order of
    LOCAL_RANK: some slots may be left out, and each host of a large node counts from 0. Elsewhere
    all chips of the node are there, and the slot is the number.
    """
    return _number(environ, "LOCAL_RANK") if NODE in environ else slot


def is_restarted(environ: Mapping[str, str]) -> bool:
    """Tell whether the job ran before and should go on from its last checkpoint, if it has one.

    Restarted by the launch files, by torchrun (--max-restarts), or requeued by Slurm.
    """
    return any(_number(environ, name) > 0 for name in _RESTARTS if environ.get(name))


def _rank_at(plan: Plan, node: str, local_rank: int) -> int:
    pool, number, slots = _read_node(node)
    used = used_chips(plan)
    here = sorted(
        (chip.slot, rank)
        for chip, rank in used.items()
        if (chip.pool, chip.node) == (pool, number) and (slots is None or chip.slot in slots)
    )
    if not here:
        known = sorted({f"{chip.pool}/{chip.node}" for chip in used})
        raise InputError(
            f"{NODE} is '{node}', where the plan uses no chip; {hint(node, known)}; "
            "is this the plan that was launched?"
        )
    if local_rank >= len(here):
        shown = Slots(tuple(slot for slot, _ in here))
        raise InputError(
            f"LOCAL_RANK is {local_rank}, but the plan uses {len(here)} chips of {node} "
            f"(slots {shown}); start {len(here)} processes there"
        )
    return here[local_rank][1]


def _read_node(text: str) -> tuple[str, int, Slots | None]:
    pool, _, rest = text.partition("/")
    number, _, slots = rest.partition("/")
    if not pool or not number.isdecimal() or rest.endswith("/"):
        raise InputError(f"{NODE} is '{text}'; write it as 'pool/node', such as 'a100/0'")
    place = Place(NODE)
    return pool, int(number), Slots.from_document(slots, place) if slots else None


def _number(environ: Mapping[str, str], name: str) -> int:
    if name not in environ:
        raise InputError(
            f"{name} is not set; start the ranks by `tutti launch PLAN --to local` or torchrun"
        )
    text = environ[name]
    if not text.isdecimal():
        raise InputError(f"{name} is '{text}'; expected a whole number")
    return int(text)
