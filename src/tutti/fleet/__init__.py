"""Several jobs on one cluster: who runs where and when; no torch, no clock, no daemon.

`chips` knows who holds what; `scheduler` is a pure state machine (events in, instructions out)
under a `policy`: an order of the queue, a `placement`, waiting and moving. `simulate` drives it
with one of the `traces`, `network` says what jobs do to each other; other schedulers are told the
topology.
"""
