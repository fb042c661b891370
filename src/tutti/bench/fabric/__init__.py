"""The network model against itself, against replays, and against the clock."""
