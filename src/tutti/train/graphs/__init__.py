"""Blocks that are captured as graphs where the chip waits for the host."""
