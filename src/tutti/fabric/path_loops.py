"""The loops that give flows their paths, compiled by numba; imported where flows are routed.

A row of `out` is a path: column 0 the port up, then one column per layer up, the same layers down,
the port down, and a last column for a hop inside the sender's node; −1 where nothing is passed.
−2 in column 0: no path is left.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tutti.loops import compiled

_A, _B, _C = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(30)
_D, _E = np.uint64(27), np.uint64(31)
_STEP = np.uint64(0x9E3779B97F4A7C15)
_TRIES = 48  # hashes before all ways are looked at, where links have failed


def _mix(value: Any) -> Any:
    """Return a well-mixed hash of 64 bits."""
    value = (value ^ (value >> _C)) * _A
    value = (value ^ (value >> _D)) * _B
    return value ^ (value >> _E)


mix = compiled(_mix)


def _choose_ports(
    a: Any, b: Any, turn: Any, chip_ports: Any, port_rail: Any, port_lane: Any
) -> Any:
    """Return the ports of the two chips for their `turn`-th connection; −1: none that meet.

    Same rail and lane before same lane.
    """
    most = chip_ports.shape[1]
    many, there = 0, 0
    for i in range(most):
        many += chip_ports[a, i] >= 0
        there += chip_ports[b, i] >= 0
    if many == 0 or there == 0:
        return -1, -1
    start = chip_ports[a, turn % many]
    other = -1
    for i in range(there):
        port = chip_ports[b, (turn + i) % there]
        if port_lane[port] == port_lane[start]:
            if port_rail[port] == port_rail[start]:
                return start, port
            if other < 0:
                other = port
    return start, other


choose_ports = compiled(_choose_ports)


def _climb(
    out: Any, row: Any, ends: Any, key: Any, polarised: Any, shape: Any, parents: Any, loads: Any
) -> Any:
    """Write the links between two leaves that differ, each switch choosing by its hash or load."""
    low, other = ends
    per_group, lanes, ways, cables, up, down, starts = shape
    width = out.shape[1] - 1
    group, far = low // per_group[0], other // per_group[0]
    x = low % per_group[0]
    column = x % lanes if per_group[0] != lanes else x
    layer = 0
    while True:
        number = ways[layer] * cables[layer]
        salt = np.uint64(0) if polarised else np.uint64(low * 8 + layer + 1) * _STEP
        picked = mix(key + salt)
        pick = np.int64(picked % np.uint64(number))
        first = up[layer] + low * number
        if loads.shape[0] > 0:  # the least loaded, the hash among equals
            best = pick
            for i in range(number):
                at = (pick + i) % number
                if loads[first + at] < loads[first + best]:
                    best = at
            pick = best
            loads[first + pick] += 1.0
        way = pick // cables[layer]
        cable = np.int64((picked >> np.uint64(17)) % np.uint64(cables[layer]))
        out[row, 1 + layer] = first + pick
        out[row, width - 2 - layer] = (
            down[layer] + (other * ways[layer] + way) * cables[layer] + cable
        )
        group, far = parents[starts[layer] + group], parents[starts[layer] + far]
        if group == far:
            return
        x = column * ways[layer] + way
        column = x
        layer += 1
        low, other = group * per_group[layer] + x, far * per_group[layer] + x


climb = compiled(_climb)


def _climb_bundles(out: Any, row: Any, ends: Any, shape: Any, parents: Any, bundles: Any) -> Any:
    """Write the bundles between two leaves that differ: packets take all ways evenly."""
    low, other = ends
    per_group, lanes, _, _, _, _, starts = shape
    width = out.shape[1] - 1
    group, far = low // per_group[0], other // per_group[0]
    x = low % per_group[0]
    lane = x % lanes if per_group[0] != lanes else x
    layer = 0
    while True:
        out[row, 1 + layer] = bundles[0, layer] + low
        out[row, width - 2 - layer] = bundles[1, layer] + other
        group, far = parents[starts[layer] + group], parents[starts[layer] + far]
        if group == far:
            return
        layer += 1
        low, other = group * lanes + lane, far * lanes + lane


climb_bundles = compiled(_climb_bundles)


def _first_alive(out: Any, row: Any, ends: Any, shape: Any, parents: Any, alive: Any) -> Any:
    """Look at every way between two leaves; write the first that works."""
    per_group, lanes, ways, cables, up, down, starts = shape
    width = out.shape[1] - 1
    height, group, far = 0, ends[0] // per_group[0], ends[1] // per_group[0]
    total = 1
    while True:
        total *= ways[height]
        group, far = parents[starts[height] + group], parents[starts[height] + far]
        height += 1
        if group == far:
            break
    for number in range(total):
        low, other = ends
        group, far = low // per_group[0], other // per_group[0]
        x = low % per_group[0]
        column = x % lanes if per_group[0] != lanes else x
        rest, good = number, True
        for layer in range(height):
            way = rest % ways[layer]
            rest //= ways[layer]
            for side in range(2):
                base = up[layer] if side == 0 else down[layer]
                lower = low if side == 0 else other
                best_link = -1
                for cable in range(cables[layer]):
                    link = base + (lower * ways[layer] + way) * cables[layer] + cable
                    if alive[link]:
                        best_link = link
                        break
                good = good and best_link >= 0
                out[row, 1 + layer if side == 0 else width - 2 - layer] = best_link
            group, far = parents[starts[layer] + group], parents[starts[layer] + far]
            x = column * ways[layer] + way
            column = x
            if layer + 1 < height:
                low, other = group * per_group[layer + 1] + x, far * per_group[layer + 1] + x
        if good:
            return True
    return False


first_alive = compiled(_first_alive)


def route(
    sources: Any, targets: Any, turns: Any, sports: Any, mode: Any,
    chips: Any, ports: Any, node_port: Any, inside: Any,
    shape: Any, parents: Any, bundles: Any, alive: Any, loads: Any, tries: Any, out: Any,
) -> None:  # fmt: skip
    """Write the path of every flow.

    `mode`: 0 hash, 1 one hash for all switches, 2 bundles, 3 least loaded, 4 the best of `tries`
    source ports. `loads` counts flows per link, for the last two.
    """
    chip_node, chip_island, chip_ports, same_host, chip_pool = chips
    port_leaf, port_rail, port_lane = ports
    island_out, bridge_out = inside
    nobody = loads[:0]
    last = out.shape[1] - 1
    num_ports, num_chips = len(port_leaf), len(chip_node)
    for row in range(len(sources)):
        a, b = sources[row], targets[row]
        if chip_node[a] == chip_node[b]:
            native = chip_island[a] >= 0 and chip_island[a] == chip_island[b]
            base = island_out if native else bridge_out
            if a != b:
                out[row, 0] = base + a
                out[row, 1] = base + num_chips + b
            continue
        if same_host[chip_pool[a], chip_pool[b]]:
            continue
        start, end = choose_ports(a, b, turns[row], chip_ports, port_rail, port_lane)
        if start >= 0 and end < 0:  # rails apart: to the neighbour on the receiver's rail first
            end = chip_ports[b, 0]
            start = node_port[chip_node[a], port_rail[end]]
            out[row, last] = (island_out if chip_island[a] >= 0 else bridge_out) + a
        if start < 0 or (len(alive) and not (alive[start] and alive[num_ports + end])):
            out[row, 0] = -2
            continue
        out[row, 0], out[row, last - 1] = start, num_ports + end
        ends = (port_leaf[start], port_leaf[end])
        if ends[0] == ends[1]:
            continue
        if mode == 2:
            climb_bundles(out, row, ends, shape, parents, bundles)
            continue
        base_key = mix(np.uint64(start) * _STEP + np.uint64(end))
        best, least, attempt, most = -1, np.inf, 0, tries if mode == 4 else 1
        while attempt < most:
            key = mix(base_key + np.uint64(sports[row]) + np.uint64(attempt) * _STEP)
            climb(out, row, ends, key, mode == 1, shape, parents, loads if mode == 3 else nobody)
            worst, good = 0.0, True
            for i in range(1, last - 1):
                if out[row, i] >= 0:
                    good = good and (len(alive) == 0 or alive[out[row, i]])
                    worst = max(worst, loads[out[row, i]] if mode == 4 else 0.0)
            if good and worst < least and attempt != best:
                best, least = attempt, worst
            attempt += 1
            if attempt == most and best < 0 and most < _TRIES:
                most = _TRIES  # around what has failed: any other hash
            elif best >= 0 and (mode != 4 or most == _TRIES):
                break
            elif attempt == most and mode == 4 and best >= 0 and best != attempt - 1:
                attempt, most, least = best, best + 1, -1.0  # once more the best one
        if best < 0 and not first_alive(out, row, ends, shape, parents, alive):
            out[row, 0] = -2
        elif mode == 4:
            for i in range(1, last - 1):
                if out[row, i] >= 0:
                    loads[out[row, i]] += 1.0
