"""Measurements that the doctor makes itself: chips alone, hosts in pairs. Needs torch."""
