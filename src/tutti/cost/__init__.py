"""Seconds and bytes: compute, memory, communication; calibration from measured runs."""
