"""Groups of equal engines, simulated by the compiled loop where requests and prices are plain.

A group's arrivals are known before it is simulated: those of the groups that requests come to, and
then of decode engines what prefill engines sent. `run` asks whether all groups of a deployment are
plain, and does it step by step where one is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tutti.batching.request import Request
from tutti.batching.request_limits import check_request
from tutti.batching.router import PROMPT_WEIGHT
from tutti.batching.settings import Settings
from tutti.cost.serving.engine_prices import EnginePrices
from tutti.cost.serving.stage_prices import STREAM_BYTES
from tutti.loops import has_numba
from tutti.simulate.serving.requests import Requests

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
QUEUE_POINTS = 4096
FEW_TOKENS = 20_000  # of answers: step by step they are made before the loop is loaded


class GroupRun(NamedTuple):
    """What the engines of a group did, by requests as they came and by engines."""

    began_s: F64
    first_s: F64
    ended_s: F64
    order: I64  # in which they ended
    engine: I64  # that had it
    busy_s: F64  # engine, stage
    use: I64  # engine, field of `group_loop`
    waited_s: F64  # of each lane: when somebody waited last
    queue: F64  # time, waiting, with a slot


def is_plain(prices: EnginePrices, requests: Requests) -> bool:
    """Tell whether the compiled loop does it: no prefixes, windows, pages on hosts, profiles.

    One lane over several stages is not its case: when the next step may begin there, it does not
    say as the engine does.
    """
    return (
        (len(prices.stages) == 1 or prices.lanes > 1)
        and not requests.shares_prefixes
        and int(requests.outputs.sum()) >= FEW_TOKENS
        and prices.windows == (None,)
        and not prices.engine.host_pages
        and all(stage.is_nominal for stage in prices.stages)
        and has_numba()
    )


def run_group(
    prices: EnginePrices, engines: int, times: F64, prompts: I64, most_new: I64
) -> GroupRun:
    """Simulate equal engines on requests in the order in which they come."""
    from tutti.batching import plain_steps as plain
    from tutti.loops import compiled
    from tutti.simulate.serving import group_loop as loop

    settings, num, every = prices.settings(), len(times), engines * prices.lanes
    longest = int((prompts + most_new).argmax())
    new = int(most_new[longest])
    check_request(Request(id=longest, prompt=(1,) * int(prompts[longest]), most_new=new), settings)
    jobs = np.zeros((num, plain.JOB_FIELDS), np.int64)
    jobs[:, plain.PROMPT], jobs[:, plain.LIMIT] = prompts, prompts + most_new
    clock = np.zeros((every, loop.CLOCK_FIELDS))
    clock[:, (loop.DUE, loop.READY)] = np.inf
    count = np.zeros(loop.COUNT_FIELDS, np.int64)
    count[loop.POINT_STEPS] = 1
    group = loop.Group(
        times=np.asarray(times, np.float64),
        jobs=jobs,
        work=prompts * PROMPT_WEIGHT + most_new,
        behind=np.zeros(num, np.int64),
        seen=np.full((num, loop.TIME_FIELDS), -1.0),
        lane_of=np.zeros(num, np.int64),
        order=np.zeros(num, np.int64),
        shape=np.array(
            [engines, prices.lanes, prices.launches_ahead, prices.imports, settings.usable_pages]
        ),
        sizes=np.array([settings.page_size, settings.most_tokens]),
        **_empty(settings, every),
        rows=np.zeros((every, settings.slots, plain.ROW_FIELDS), np.int64),
        flight=np.zeros((every, loop.FLIGHT_FIELDS), np.int64),
        clock=clock,
        free=np.zeros((engines, len(prices.stages))),
        busy=np.zeros((engines, len(prices.stages))),
        engine_work=np.zeros(engines),
        use=np.zeros((engines, loop.USE_FIELDS), np.int64),
        queue=np.zeros((QUEUE_POINTS, 3)),
        count=count,
        load=np.zeros(loop.LOAD_FIELDS),
        **_prices(prices),
    )
    compiled(loop.simulate_group)(group)
    return GroupRun(
        began_s=group.seen[:, loop.BEGAN],
        first_s=group.seen[:, loop.FIRST],
        ended_s=group.seen[:, loop.ENDED],
        order=group.order[: count[loop.OVER]],
        engine=group.lane_of // prices.lanes,
        busy_s=group.busy,
        use=group.use,
        waited_s=clock[:, loop.WAITED],
        queue=group.queue[: count[loop.POINTS]],
    )


def _empty(settings: Settings, lanes: int) -> dict[str, I64]:
    """Return lanes to which nobody came."""
    from tutti.batching import plain_steps as plain

    slots = np.zeros((lanes, plain.SLOT_FIELDS, settings.slots), np.int64)
    slots[:, plain.JOB] = -1
    slots[:, plain.STACK] = np.arange(settings.slots - 1, -1, -1)
    lane = np.zeros((lanes, plain.LANE_FIELDS), np.int64)
    lane[:, plain.FREE] = settings.usable_pages
    lane[:, (plain.BACK, plain.HEAD, plain.TAIL)] = -1
    return {"slots": slots, "lane": lane}


def _prices(prices: EnginePrices) -> dict[str, F64 | I64]:
    """Return what a step takes as arrays; see `group_loop.Group`."""
    parts = [prices.stages[number].curves() for number in prices.distinct[0]]
    attention = np.zeros((len(parts), max(len(part.attention) for part in parts), 4))
    for place, part in enumerate(parts):
        attention[place, : len(part.attention)] = part.attention
    wires = np.zeros((len(prices.wires), 2))
    for place, wire in enumerate(prices.wires):
        wires[place] = wire.latency_s, prices.model.hidden * STREAM_BYTES * wire.byte_s
    return {
        "parts": np.zeros(len(parts)),
        "counts": parts[0].counts,
        "products": np.array([part.products for part in parts]),
        "heads": np.array([part.head for part in parts]),
        "attention": attention,
        "places": np.array(prices.distinct[1], np.int64),
        "wires": wires,
        "own": np.array([prices.host_s, prices.wires[0].latency_s if prices.wires else 0.0]),
    }


def merged(queues: Sequence[F64]) -> F64:
    """Return the queues of groups as one: all that wait, and all that have a slot."""
    if len(queues) == 1:
        return queues[0]
    times = np.concatenate([queue[:, 0] for queue in queues])
    changes = np.concatenate([np.diff(queue[:, 1:], axis=0, prepend=0.0) for queue in queues])
    order = np.argsort(times, kind="stable")
    return np.column_stack((times[order], np.cumsum(changes[order], axis=0)))
