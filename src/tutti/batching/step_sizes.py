"""The sizes that steps are filled up to where they run as graphs: of each size one is made."""

from __future__ import annotations

LARGEST = 2048  # tokens of a captured step
MIXED = (64, 128, 256, 512, 768, 1024, LARGEST)  # tokens of captured steps with prompts
LARGE_MULTIPLE = 512  # tokens of steps that are not captured
FEWEST_ROWS = 32  # of steps with prompts
FEW_LONG = 4  # prompts at a time, as they come in one by one
# rows grow by: with few prompts, where latency counts; with many at once
MORE_ROWS, MANY_MORE_ROWS = 2, 8
_FEWEST_KEYS, _MORE_KEYS = 1024, 8


def decode_rows(count: int) -> int:
    """Return the rows of a step of single tokens: 1, 2, 4, 8, 12, 16, 24, 32 and so on."""
    if count <= 8:
        return 1 << max(0, count - 1).bit_length()
    size = 1 << (count - 1).bit_length()
    return size * 3 // 4 if count <= size * 3 // 4 else size


def mixed_rows(count: int, *, few: bool) -> int:
    """Return the rows of a step with prompts; `few`: prompts are few in it."""
    return _stepped(count, FEWEST_ROWS, MORE_ROWS if few else MANY_MORE_ROWS)


def mixed_tokens(count: int, most: int) -> int:
    """Return the tokens of a step with prompts, of which there are at most so many."""
    fitting = (size for size in MIXED if size >= count)
    large = -(-count // LARGE_MULTIPLE) * LARGE_MULTIPLE
    return min(next(fitting, large), most)


def keys_for(most_keys: int, longest: int) -> int:
    """Return the keys that a step's tables have room for, at most as a sequence may have."""
    return min(_stepped(most_keys, _FEWEST_KEYS, _MORE_KEYS), longest)


def _stepped(count: int, first: int, factor: int) -> int:
    """Return the next of first, first × factor, first × factor² and so on."""
    size = first
    while size < count:
        size *= factor
    return size
