"""How patterns read messages: a pattern that begins with a letter begins a word, in any case of it.

"fuse: error" is no part of "refused, exceeded error", and what one program writes as "Transport
endpoint is not connected", another has in the middle of a sentence.
"""

from __future__ import annotations

import re

# before a letter there is no letter, or a new word of several that are written together (CamelCase)
_BEGINS = r"(?:(?![A-Za-z])|(?<![A-Za-z])|(?-i:(?<=[a-z])(?=[A-Z])))"
_FLAGS = re.compile(r"\(\?[a-z]+\)")
# the first word of a sentence: a capital, small letters, and a blank or a choice of words after it
_FIRST_WORD = re.compile(r"(^|(?<!\\)\||(?<!\\)\(\?:)([A-Z])(?=[a-z]+ )")


def of_words(pattern: str) -> str:
    """Return a pattern that begins with a word, whose first letter may be of either case."""
    flags = _FLAGS.match(pattern)
    head = flags.group() if flags else ""
    body = _FIRST_WORD.sub(
        lambda found: f"{found[1]}[{found[2]}{found[2].lower()}]", pattern[len(head) :]
    )
    return f"{head}{_BEGINS}(?:{body})"
