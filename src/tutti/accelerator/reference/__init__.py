"""One implementation of each operator in plain torch: the meaning of the operators.

Any device that runs torch runs these. Chip implementations are held against them, and against the
same in float64, by the conformance kit.
"""
