"""Keys and values on their way from the engine that computes a prompt to the one that decodes.

Each layer's leave behind its computation, from every rank that holds them to every rank that needs
them, through host memory; ranks, cuts, page sizes and formats of the two engines may differ. What
does not arrive is computed again.
"""
