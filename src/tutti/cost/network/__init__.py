"""Seconds of transfers and collectives: closed forms, programs on links, host memory, files."""
