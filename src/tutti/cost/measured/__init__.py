"""Prices from a chip's own `Profile`: operators as measured, interpolated between shapes."""
