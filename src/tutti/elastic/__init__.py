"""Training that goes on: members, generations, failures noticed, what is left planned anew.

Needs no torch. `Membership` decides, as a pure state machine; `Controller` and `Agent` give it a
clock, sockets and processes.
"""
