"""Probes over every path of a network, and what ports of NICs and switches count."""
