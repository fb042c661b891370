"""Which chip, NIC or link of a cluster is slow, from rounds of measurements. Pure."""
