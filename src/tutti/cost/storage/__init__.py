"""Seconds of files: data, checkpoints through the tiers, restores, and what failures cost a day."""
