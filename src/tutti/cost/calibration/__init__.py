"""Calibration: from measured runs to the constants of a chip under a software stack, and scores."""
