"""The loop of the queue model, for numba; `fabric.queues` loads it when first needed.

Every flow has one entry per hop: the bytes that wait for that hop's link. A step moves bytes one
hop on; what waits for one link is served in proportion, as a mixed first-come queue is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tutti.loops import compiled

PACKET_BYTES = 1024.0
_ADJUST_STEPS = 50  # between looks at marks: a sender's timer of 50 µs at steps of 1 µs
_GAIN = 1.0 / 16.0
_RAISE = 0.005  # of the line rate, per look without marks


def _move(offsets: Any, links: Any, bytes_: Any, shares: Any, chances: Any,
          sent: Any, marks: Any, marked: Any, delivered: Any) -> None:  # fmt: skip
    """Move what each link carries one hop on, the last hop first (compiled)."""
    for flow in range(len(offsets) - 1):
        last = offsets[flow + 1] - 1
        for at in range(last, offsets[flow] - 1, -1):
            link = links[at]
            moved = bytes_[at] * shares[link]
            if moved <= 0.0:
                continue
            bytes_[at] -= moved
            sent[link] += moved
            if at == last:
                delivered[flow] += moved
            else:
                bytes_[at + 1] += moved
            packets = chances[link] * moved / PACKET_BYTES
            marks[link] += packets
            marked[flow] += packets


def _adjust(marked: Any, rates: Any, targets: Any, alphas: Any, calm: Any, lines: Any) -> None:
    """Slow senders whose packets were marked down, and let the others recover (compiled)."""
    for flow in range(len(rates)):
        if marked[flow] >= 1.0:
            alphas[flow] = (1.0 - _GAIN) * alphas[flow] + _GAIN
            targets[flow] = rates[flow]
            rates[flow] = max(lines[flow] * 1e-3, rates[flow] * (1.0 - alphas[flow] / 2.0))
            calm[flow] = 0
        else:
            alphas[flow] *= 1.0 - _GAIN
            calm[flow] += 1
            if calm[flow] > 5:
                targets[flow] = min(lines[flow], targets[flow] + _RAISE * lines[flow])
            rates[flow] = min(lines[flow], (rates[flow] + targets[flow]) / 2.0)
        marked[flow] = 0.0


def _pause(offsets: Any, links: Any, bytes_: Any, ingress: Any, wanted: Any, forced: Any,
           xoff: Any, xon: Any, frames: Any) -> None:  # fmt: skip
    """Decide which links are told to stop: their far end holds too much of what they brought."""
    ingress[:] = 0.0
    for flow in range(len(offsets) - 1):
        for at in range(offsets[flow] + 1, offsets[flow + 1]):
            ingress[links[at - 1]] += bytes_[at]
    for link in range(len(ingress)):
        stop = wanted[link]
        if forced[link] or ingress[link] > xoff:
            stop = 1
        elif ingress[link] < xon:
            stop = 0
        if stop and not wanted[link]:
            frames[link] += 1.0
        wanted[link] = stop


move, adjust, pause = compiled(_move), compiled(_adjust), compiled(_pause)


def advance(steps: Any, now: Any, step_s: Any, ports: Any, offsets: Any, links: Any, capacity: Any,
            starts: Any, stops: Any, rules: Any, forced: Any, bytes_: Any, per_flow: Any,
            per_link: Any, history: Any, calm: Any) -> None:  # fmt: skip
    """Advance the network by some steps (compiled)."""
    rates, targets, alphas, lines, marked, delivered = per_flow
    sent, paused_s, frames, marks, discards = per_link
    xoff, xon, low, high, most, dcqcn, pfc, room = rules
    count, delay = len(capacity), len(history)
    queue, shares, chances = np.zeros(count), np.zeros(count), np.zeros(count)
    ingress, wanted = np.zeros(count), history[(now - 1) % delay].copy()
    for step in range(now, now + steps):
        time = step * step_s
        for flow in range(len(rates)):
            at = offsets[flow]
            if starts[flow] <= time < stops[flow] and bytes_[at] < 2.0 * capacity[links[at]]:
                bytes_[at] += rates[flow] * step_s
        queue[:] = 0.0
        for at in range(len(links)):
            queue[links[at]] += bytes_[at]
        stopped = history[step % delay]
        for link in range(count):
            if stopped[link]:
                paused_s[link] += step_s
                shares[link] = 0.0
            else:
                shares[link] = min(1.0, capacity[link] / queue[link]) if queue[link] > 0.0 else 0.0
            over = (queue[link] - low) / (high - low)
            if link < ports:  # hosts do not mark what waits inside them
                chances[link] = 1.0 if over >= 1.0 else max(0.0, over) * most
        move(offsets, links, bytes_, shares, chances, sent, marks, marked, delivered)
        pause(offsets, links, bytes_, ingress, wanted, forced, xoff if pfc else np.inf, xon, frames)
        if not pfc:
            for flow in range(len(rates)):
                for at in range(offsets[flow] + 1, offsets[flow + 1]):
                    held = ingress[links[at - 1]]
                    if held > room:
                        lost = bytes_[at] * (1.0 - room / held)
                        bytes_[at] -= lost
                        discards[links[at]] += lost / PACKET_BYTES
        history[step % delay] = wanted
        if dcqcn and step % _ADJUST_STEPS == 0:
            adjust(marked, rates, targets, alphas, calm, lines)
