"""The network between nodes, link by link: wired, routed, shared, designed.

`wiring` makes switches and directed links of a cluster file; `paths` gives flows their links, by
the fabric's routing and around what has `failures`; `shares` says how fast they go. What a
collective program does on it is replayed at three grains: `replay` (steady phases), `rounds` (each
rank at its own pace), `messages` (store and forward). `design` makes fabrics. No torch.
"""
