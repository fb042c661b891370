"""Every figure that is kept by the second: its name by Prometheus' rules, kind, and meaning.

Names have base units (seconds, bytes, celsius, ratio); what only grows ends with `_total`. Those of
hosts are sampled; those of ranks are where each rank's last step went. The page
docs/reference/metrics.md shows this table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_QUOTED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFigure:
    """One figure, and what it means."""

    name: str
    kind: Literal["gauge", "counter"]
    label: str  # what tells several of a host apart; "" where there is one
    means: str


def _figure(name: str, label: str, means: str) -> HostFigure:
    kind: Literal["gauge", "counter"] = "counter" if name.endswith("_total") else "gauge"
    return HostFigure(name=f"tutti_{name}", kind=kind, label=label, means=means)


FIGURES = {
    figure.name: figure
    for figure in (
        _figure("host_cpu_busy_ratio", "", "share of the CPUs' time that was not idle"),
        _figure("host_memory_used_ratio", "", "share of the memory that cannot be had"),
        _figure("host_memory_available_bytes", "", "memory that a program may still get"),
        _figure("host_pressure_ratio", "resource", "share of 10 s in which a task waited"),
        _figure("host_disk_read_bytes_total", "disk", "bytes read from a disk"),
        _figure("host_disk_written_bytes_total", "disk", "bytes written to a disk"),
        _figure("host_disk_busy_seconds_total", "disk", "time in which a disk was busy"),
        _figure("file_system_free_bytes", "mount", "room that is left on a file system of the run"),
        _figure("file_system_free_ratio", "mount", "the same, as a share of what can be used"),
        _figure("file_system_free_inodes_ratio", "mount", "share of its files that can be made"),
        _figure("file_system_write_seconds", "mount", "4 KiB written and synced, or waited for"),
        _figure("file_system_read_seconds", "mount", "the same read again, past the cache"),
        _figure("checkpoint_age_seconds", "", "time since the last checkpoint; served, not kept"),
        _figure("nic_received_bytes_total", "nic", "bytes received"),
        _figure("nic_sent_bytes_total", "nic", "bytes sent"),
        _figure("nic_errors_total", "nic", "frames that were damaged, either way"),
        _figure("nic_dropped_total", "nic", "frames that were thrown away, either way"),
        _figure("nic_pause_frames_received_total", "nic", "pauses that the switch asked for"),
        _figure("nic_pause_frames_sent_total", "nic", "pauses that the host asked its switch for"),
        _figure("nic_paused_seconds_total", "nic", "time in which the switch had stopped the NIC"),
        _figure("nic_symbol_errors_total", "nic", "frames or symbols damaged on the wire (driver)"),
        _figure("nic_discards_total", "nic", "frames that the port threw away (driver)"),
        _figure("nic_no_buffer_total", "nic", "frames for which the host had no buffer (driver)"),
        _figure("nic_link_downs_total", "nic", "how often the link went down (driver)"),
        _figure("nic_congestion_marks_total", "nic", "packets that a switch marked (driver)"),
        _figure("tcp_retransmitted_segments_total", "", "segments that were sent again"),
        _figure("rdma_received_bytes_total", "port", "bytes received by an RDMA port"),
        _figure("rdma_sent_bytes_total", "port", "bytes sent by a port"),
        _figure("rdma_symbol_errors_total", "port", "symbol errors: a bad cable or transceiver"),
        _figure("rdma_link_downs_total", "port", "how often the link went down"),
        _figure("rdma_discards_total", "port", "packets that were thrown away"),
        _figure("rdma_wait_ticks_total", "port", "ticks in which data waited: congestion"),
        _figure("rdma_retries_total", "port", "transfers that were not acknowledged in time"),
        _figure("rdma_out_of_sequence_total", "port", "packets that came out of order"),
        _figure("rdma_lost_packets_total", "port", "gaps in a sender's numbers: packets were lost"),
        _figure("rdma_receiver_not_ready_total", "port", "receivers that never became ready"),
        _figure("rdma_link_recoveries_total", "port", "how often the link was trained again"),
        _figure("rdma_receive_errors_total", "port", "packets that came with an error"),
        _figure("rdma_congestion_notices_total", "port", "notices of congestion that slowed it"),
        _figure("rdma_congestion_marks_total", "port", "packets that a switch marked"),
        _figure("probes_received_total", "peer", "probes that came from a host, over all paths"),
        _figure("probe_delay_seconds", "peer", "the last probe's delay, clocks not set right"),
        _figure("probe_rate_bytes", "peer", "bytes per second at which the last train came"),
        _figure("neighbour_round_trip_seconds", "peer", "to a neighbour host of the run, and back"),
        _figure("neighbour_loss_ratio", "peer", "of the last 30 probes to it, those unanswered"),
        _figure("chip_busy_ratio", "chip", "share of the last sample in which a kernel ran"),
        _figure("chip_memory_used_bytes", "chip", "memory in use"),
        _figure("chip_power_watts", "chip", "power drawn"),
        _figure("chip_temperature_celsius", "chip", "temperature of the chip"),
        _figure("chip_clock_hertz", "chip", "clock of the multiprocessors"),
        _figure("chip_throttle_reasons", "chip", "why its clock is held down, as bits"),
        _figure("chip_held_back_ratio", "chip", "1 where heat, power or a fault slows its clock"),
        _figure("chip_unwell_ratio", "chip", "1 where its own tool says that it is not well"),
        _figure("chip_ecc_uncorrected_total", "chip", "uncorrectable errors of its memory"),
        _figure("chip_ecc_corrected_total", "chip", "errors of its memory that were corrected"),
        _figure("chip_pcie_replays_total", "chip", "packets that its PCIe link sent again"),
        _figure("chip_xid_errors_total", "chip", "errors that NVIDIA's driver told (Xid)"),
        _figure("chip_last_xid_code", "chip", "the code of the last of them"),
        _figure("chip_link_sent_bytes_total", "link", "bytes sent by a link between chips"),
        _figure("chip_link_received_bytes_total", "link", "bytes received by it"),
        _figure("chip_link_crc_errors_total", "link", "checksums of it that were wrong"),
        _figure("chip_link_replays_total", "link", "packets that it sent again"),
        _figure("chip_link_recoveries_total", "link", "how often it was trained again"),
        _figure("slow_chip_ratio", "chip", "times as long as a chip should take, since it is slow"),
        _figure("slow_wire_ratio", "wire", "the same of a wire, or of the link between two"),
        _figure("rank_step_seconds", "rank", "a rank's last step, from its begin to its end"),
        _figure("rank_compute_seconds", "rank", "its last step in passes and the optimizer"),
        _figure("rank_communication_seconds", "rank", "waiting for the network itself"),
        _figure("rank_bubble_seconds", "rank", "waiting for other ranks"),
        _figure("rank_copy_seconds", "rank", "waiting for copies between host and chip"),
        _figure("rank_data_seconds", "rank", "waiting for data"),
        _figure("rank_other_seconds", "rank", "the engine's own work"),
        _figure("rank_memory_peak_bytes", "rank", "the most memory that was in use at once"),
    )
}  # fmt: skip


def key(name: str, label: str = "") -> str:
    """Return the key of a figure; an unknown name is a mistake in code."""
    figure = FIGURES[f"tutti_{name}"]
    if not figure.label:
        return figure.name
    quoted = label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{figure.name}{{{figure.label}="{quoted}"}}'


def label_of(name: str) -> str:
    """Return the label of a key, as it was before it was quoted; "" where there is none."""
    inside = name.partition("{")[2].partition('="')[2].removesuffix('"}')
    return _QUOTED.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], inside)
