"""Writes `tales.txt`: short tales of an orchestra, from a grammar of our own and a seed.

People, instruments and places stay the same within a tale, so that there is something to learn at
every distance: spelling, grammar, and who plays what. `python -m tutti.train.data.text.tales`
prints the file; a test compares the two.
"""

from __future__ import annotations

import random
import re

NUM_TALES = 320
SEED = 7

WORDS: dict[str, tuple[str, ...]] = {
    "person": (
        "Ada", "Bruno", "Clara", "Dario", "Edda", "Felix", "Greta", "Hugo", "Ines", "Jonas",
        "Katja", "Leo", "Mira", "Nils", "Olga", "Paolo", "Rosa", "Stefan", "Tilda", "Vera",
    ),
    "instrument": (
        "violin", "viola", "cello", "double bass", "flute", "oboe", "clarinet", "bassoon", "horn",
        "trumpet", "trombone", "tuba", "harp", "timpani", "triangle", "piccolo",
    ),
    "place": (
        "the old town hall", "a barn behind the mill", "the school by the river",
        "the small theatre", "the railway station", "a church on the hill", "the market square",
        "the empty factory", "the library", "the harbour",
    ),
    "time": (
        "On Monday", "One evening", "Before breakfast", "At noon", "Late at night",
        "In the first week of spring", "When the snow had gone", "On the day of the concert",
        "After the rain", "During the long summer",
    ),
    "piece": (
        "the slow march", "the second waltz", "the song of the ferry", "the winter dance",
        "the quiet overture", "the hunting tune", "the last chorale", "the shepherd's round",
    ),
    "fault": (
        "a string was loose", "a key stuck", "the case would not open",
        "the pages were out of order",
        "the stand had only two legs", "the lamp had gone out", "the tuning was a little flat",
        "the first bar had been torn off",
    ),
    "repair": (
        "tightened the screw", "found a drop of oil", "asked the neighbour for a spare part",
        "read the bar again, slowly", "lent a pencil and a steady hand", "lit two candles",
        "tied it with a piece of thread", "counted aloud until everyone agreed",
    ),
    "weather": (
        "it was raining", "the wind was in the trees", "the sun had just come up",
        "fog lay on the water", "the stars were out", "a cold wind came from the north",
    ),
    "manner": ("softly", "too fast", "very slowly", "with great care", "by heart", "a little late"),
    "feeling": ("glad", "tired", "proud", "worried", "surprised", "calm"),
    "number": ("two", "three", "four", "five", "six", "seven", "twelve"),
    "sound": (
        "like a door in an old house", "like rain on a tin roof", "like a bell under water",
        "like one long breath", "like birds before the light", "like a train far away",
    ),
}  # fmt: skip

OPENINGS = (
    "{time} {a} carried the {x} to {place}, and {weather}.",
    "{a} had played the {x} for {number} years, and had never been to {place}.",
    "There was once a {x} in {place} that nobody could play except {a}.",
    "{time} a letter came to {place}: the orchestra needed a {x}, and {a} had one.",
)
MIDDLES = (
    "{b} was there already with the {y}, and played {piece} {manner}.",
    "“Is that a {x}?” asked {b}. “It is,” said {a}, “and that must be your {y}.”",
    "But {fault}, and so {b} {repair}.",
    "The {x} answered {sound}, and the {y} waited for {number} bars.",
    "“You are {number} bars ahead of me,” said {b}. “Then I shall wait,” said {a}.",
    "{c}, who held the baton, said that {piece} must be played {manner} or not at all.",
    "They tried {piece} {number} times, and {b} was {feeling}, and {a} was {feeling}.",
    "When {a} played {manner}, {b} played {manner}, and {c} shook a head and began again.",
    "The {y} was older than the {x}, but together they sounded {sound}.",
    "{time} {c} moved the {y} nearer to the {x}, because the slow one sets the time for all.",
    "{a} took the easy part of {piece} and gave {b} the hard one, and both had enough to do.",
    "Outside {weather}, and in {place} somebody closed a window.",
)
CLOSINGS = (
    "At the end all of them played {piece} together, and nobody in {place} said a word.",
    "“Tutti,” said {c}, and the {x} and the {y} began as one.",
    "So {a} and {b} went home from {place}, {feeling}, with the {x} and the {y} in one cart.",
    "And since that day {piece} is played {manner} in {place}, and {a} still has the {x}.",
)

_SLOT = re.compile(r"\{(\w+)\}")


def _sentence(pattern: str, fixed: dict[str, str], chance: random.Random) -> str:
    text = _SLOT.sub(lambda slot: fixed.get(slot[1]) or chance.choice(WORDS[slot[1]]), pattern)
    text = re.sub(r"\ba (?=oboe)", "an ", text)
    return text[0].upper() + text[1:]


def tale(chance: random.Random) -> str:
    """Return one tale, a paragraph of seven to fourteen sentences."""
    names = chance.sample(WORDS["person"], 3)
    instruments = chance.sample(WORDS["instrument"], 2)
    fixed = dict(zip("abcxy", (*names, *instruments), strict=True))
    fixed |= {"place": chance.choice(WORDS["place"]), "piece": chance.choice(WORDS["piece"])}
    middles = chance.sample(MIDDLES, chance.randint(5, len(MIDDLES)))
    patterns = [chance.choice(OPENINGS), *middles, chance.choice(CLOSINGS)]
    return " ".join(_sentence(pattern, fixed, chance) for pattern in patterns)


def tales() -> str:
    """Return the whole file."""
    chance = random.Random(SEED)
    return "\n\n".join(tale(chance) for _ in range(NUM_TALES)) + "\n"


if __name__ == "__main__":
    print(tales(), end="")
