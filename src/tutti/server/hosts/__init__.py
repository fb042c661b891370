"""A planned deployment on several hosts: one front, an agent on each host that has engines' chips.

The front answers clients and says which engines are to run; agents run their ranks of them and say
how these are. Both sides say all of it every time, so that a lost message costs half a second.
"""
