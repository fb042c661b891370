"""Which link, switch or host is to blame: probes and counters in, names out. Pure."""
