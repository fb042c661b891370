"""Bytes on a chip and its host: state, activations, and what each instruction takes."""
