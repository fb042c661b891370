"""Samplers: what a host, its NICs, its file systems and its chips count."""
