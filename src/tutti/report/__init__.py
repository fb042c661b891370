"""Self-contained HTML pages: one file, no network, for screens and for paper.

`page` is the skeleton, `binary` carries arrays, `palette` colours stages; `bars`, `cluster_map`,
`gantt`, `lines`, `tables` and `tiles` make parts of a page; `simulation` puts the page of a
simulated step together, `planning` that of a search's answer. Scripts and styles are files under
`assets/` and are inlined when a page is written.
"""
