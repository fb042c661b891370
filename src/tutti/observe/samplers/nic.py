"""Network interfaces, TCP, and ports of InfiniBand and RoCE, as Linux and drivers count them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tutti.observe.figures import key
from tutti.observe.network.driver_counters import driver_counters, driver_figures
from tutti.observe.samplers.sampler import ROOT, Say, Values

# sysfs name below counters/ or hw_counters/ → figure, and what one count is
_RDMA = {
    "counters/port_rcv_data": ("rdma_received_bytes_total", 4.0),
    "counters/port_xmit_data": ("rdma_sent_bytes_total", 4.0),
    "counters/symbol_error": ("rdma_symbol_errors_total", 1.0),
    "counters/link_downed": ("rdma_link_downs_total", 1.0),
    "counters/port_xmit_discards": ("rdma_discards_total", 1.0),
    "counters/port_xmit_wait": ("rdma_wait_ticks_total", 1.0),
    "hw_counters/local_ack_timeout_err": ("rdma_retries_total", 1.0),
    "counters/link_error_recovery": ("rdma_link_recoveries_total", 1.0),
    "counters/port_rcv_errors": ("rdma_receive_errors_total", 1.0),
    "hw_counters/out_of_sequence": ("rdma_out_of_sequence_total", 1.0),
    "hw_counters/packet_seq_err": ("rdma_lost_packets_total", 1.0),
    "hw_counters/rnr_nak_retry_err": ("rdma_receiver_not_ready_total", 1.0),
    "hw_counters/rp_cnp_handled": ("rdma_congestion_notices_total", 1.0),
    "hw_counters/np_ecn_marked_roce_packets": ("rdma_congestion_marks_total", 1.0),
}
_NIC = {
    "rx_bytes": "nic_received_bytes_total",
    "tx_bytes": "nic_sent_bytes_total",
    "rx_errors": "nic_errors_total",
    "tx_errors": "nic_errors_total",
    "rx_dropped": "nic_dropped_total",
    "tx_dropped": "nic_dropped_total",
}


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


class NicSampler:
    """Network interfaces, TCP, and ports of InfiniBand and RoCE, from sysfs."""

    def __init__(self, say: Say = lambda _: None, root: Path = ROOT) -> None:
        self._root = root
        ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
        self._ports = {f"{p.parents[1].name}:{p.name}": p for p in ports}
        nics = sorted(p.name for p in (root / "sys/class/net").glob("*")) if root == ROOT else []
        # drivers are asked by name, whatever folder stands for the machine
        self._drivers = [nic for nic in nics if driver_figures(driver_counters(nic))]
        if not ports:
            say("no port of InfiniBand or RoCE on this host")

    def sample(self) -> Values:
        """Return what the NICs count now."""
        values: Values = {}
        for folder in sorted((self._root / "sys/class/net").glob("*/statistics")):
            if folder.parent.name == "lo":
                continue
            for file, name in _NIC.items():
                if (value := _number(folder / file)) is not None:
                    at = key(name, folder.parent.name)
                    values[at] = values.get(at, 0.0) + value
        for port, folder in self._ports.items():
            for file, (name, unit) in _RDMA.items():
                if (value := _number(folder / file)) is not None:
                    values[key(name, port)] = value * unit
        for nic in self._drivers:
            for name, value in driver_figures(driver_counters(nic)).items():
                values[key(name, nic)] = value
        with contextlib.suppress(OSError, ValueError, IndexError):
            values |= self._tcp()
        return values

    def _tcp(self) -> Values:
        lines = (self._root / "proc/net/snmp").read_text().splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        sent_again = float(values[names.index("RetransSegs")])
        return {key("tcp_retransmitted_segments_total"): sent_again}
