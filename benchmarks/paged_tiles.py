"""Time attention to pages with several tiles, by rows and their keys.

python -m benchmarks.paged_tiles; `--warm I/N` compiles every N-th kernel and times nothing.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.few_rows import timed
from tutti.accelerator.cuda.pages import attention as paged
from tutti.accelerator.paged_segments import PagedSegments

HEADS, GROUPS, WIDTH, SIZE = 32, 8, 128, 16
SINGLE = [
    (16, n, w, s)
    for n, w, s in (
        (64, 4, 5),
        (64, 4, 3),
        (128, 4, 3),
        (32, 4, 6),
        (64, 2, 4),
        (128, 8, 3),
        (32, 2, 5),
        (32, 1, 5),
        (16, 1, 6),
    )
]
LONG = [
    (128, 64, 8, 3),
    (128, 64, 4, 3),
    (128, 128, 8, 2),
    (64, 64, 4, 3),
    (128, 64, 8, 2),
    (128, 32, 4, 4),
    (64, 64, 4, 4),
]


def steps(queries: list[int], keys: list[int], most_keys: int) -> PagedSegments:
    """Return rows whose pages lie anywhere."""
    pages = torch.randperm(sum(-(-k // SIZE) for k in keys)).tolist()
    tables = [[pages.pop() for _ in range(-(-k // SIZE))] for k in keys]
    made = PagedSegments.of(queries, keys, tables, SIZE, "cuda")
    from dataclasses import replace

    return replace(made, most_keys=most_keys)


def main() -> None:
    """Print µs, fastest first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--warm", default="")
    given = parser.parse_args()
    mine = [int(part) for part in given.warm.split("/")] if given.warm else None
    number = 0
    shapes = [
        ("decode", [1] * rows, [keys] * rows, most)
        for rows, keys, most in (
            (1, 330, 1024),
            (16, 330, 1024),
            (64, 330, 1024),
            (128, 380, 1024),
            (256, 380, 1024),
            (256, 380, 4096),
            (128, 2000, 4096),
            (8, 30000, 32768),
        )
    ]
    shapes += [
        ("prefill", [q] * rows, [q] * rows, q) for rows, q in ((16, 512), (4, 2048), (1, 8192))
    ]
    for kind, queries, keys, most in shapes:
        made = steps(queries, keys, most)
        pages = sum(-(-k // SIZE) for k in keys)
        k = torch.randn(pages, SIZE, GROUPS, WIDTH, device="cuda", dtype=torch.bfloat16)
        v = torch.randn_like(k)
        q = torch.randn(sum(queries), HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
        times = {}
        tiles = {"decode": paged._MANY, "prefill": paged._LONG}[kind]
        for tile in SINGLE if kind == "decode" else LONG:
            number += 1
            if mine and number % mine[1] != mine[0]:
                continue
            tiles[128] = paged._Tile(*tile)
            try:
                paged.paged_attention(q, k, v, made, scale=0.1)
                if not mine:
                    times[str(tile[1:] if kind == "decode" else tile)] = timed(
                        lambda _i, q=q, k=k, v=v, made=made: paged.paged_attention(
                            q, k, v, made, scale=0.1
                        )
                    )
            except Exception as error:
                times[str(tile) + repr(error)[:50]] = 1e6
        if not mine:
            floor = (
                2 * k.numel() * 2 / 4.8e6
                if kind == "decode"
                else 2 * sum(x * x for x in keys) * HEADS * WIDTH / 9.9e8
            )
            best = sorted(times.items(), key=lambda pair: pair[1])
            print(
                f"{kind} {len(queries)} x {keys[0]} of {most}, floor {floor:.1f}: "
                + ", ".join(f"{label} {us:.1f}" for label, us in best),
                flush=True,
            )


if __name__ == "__main__":
    main()
