"""Coarse strategies by the hundred thousand, and the few that are worth a closer look."""
