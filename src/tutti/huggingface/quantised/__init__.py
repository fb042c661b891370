"""Folders with weights of 8 and 4 bits, as they are: fp8, int8, AWQ, GPTQ, compressed-tensors.

`scheme` reads config.json's `quantization_config`, `modules` finds which tensors belong together,
`unpack` makes codes, scales and zeros of them. What they stand for is the reader's business.
"""
