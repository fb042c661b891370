"""What serving's prices rest on beside the constants of training: each with where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tutti.cost.constants import Constants
from tutti.cost.families import LAUNCH_S, nominal_constants
from tutti.hardware.chip import Chip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConstants:
    """Of a chip whose launches take `LAUNCH_S`; slower hosts have longer gaps."""

    # from the end of one kernel to the end of the next, empty one, inside a captured graph: CUDA
    # graphs replay dependent kernels every 2 to 3 µs
    graph_kernel_s: float = 2.5e-6
    # an all-reduce of few bytes inside a graph: a bare NCCL call takes about 20 µs (constants.yaml)
    collective_s: float = 20e-6
    # of the memory bandwidth, where decodes read keys page by page: pages of 16 tokens of one head
    # are 4 KiB, half of what a stream of whole rows keeps on the way
    paged_efficiency: float = 0.6
    # of a row with one query: its block table, its share of the kernel's second pass over splits
    row_s: float = 1.0e-8
    # seconds of the host between two steps that no running step hides: the engine schedules under
    # the running one and reads tokens a step late
    step_s: float = 5e-5
    # of a step in several stages: the message that says what was sampled, and the next schedule
    staged_step_s: float = 3e-4
    # small kernels of a step beside those of its units: places, positions, rotary tables, rows
    # that are wanted, stop tokens: 118 to 150 µs of an H200, from steps of one and three layers
    step_kernels: float = 50.0
    logit_bytes: float = 12.0  # per logit, of sampling: read twice, written once in fp32


def serving_constants(chip: Chip) -> ServingConstants:
    """Return the constants of a chip, by its launch overhead."""
    slower = chip.launch_overhead_s / LAUNCH_S
    plain = ServingConstants()
    return replace(
        plain,
        graph_kernel_s=plain.graph_kernel_s * slower,
        collective_s=plain.collective_s * slower,
    )


def captured_constants(chip: Chip, own: ServingConstants) -> Constants:
    """Return training's constants as they are inside a graph: no host, shorter gaps."""
    return replace(
        nominal_constants(chip),
        kernel_gap_s=own.graph_kernel_s,
        link_latency_s=own.collective_s,
    )
