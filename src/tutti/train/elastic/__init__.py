"""Ranks that outlive their generation: held state, copies in memory, and how they go on."""
