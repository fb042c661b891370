"""Colours of pipeline stages: the hue says which stage, the lightness which pipeline.

Hues run from blue by green and orange to magenta in the order of the stages, so that neighbours
in the pipeline are neighbours in colour; where there are many, their lightness alternates too.
Colours are OKLCH, whose steps look equal; page.css gives base lightness and chroma per theme.
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_HUE = 255.0  # blue
_TWO_APART = 195.0  # between the only two stages: blue and orange
_WIDEST = 285.0  # between the first and the last of many: ends before blue comes again
_MANY = 12
_ALTERNATE = (0.0, 0.075, -0.075)
_PIPELINES = 0.22  # lightness from the darkest to the lightest pipeline


@dataclass(frozen=True, slots=True)
class StageColor:
    """A hue in degrees, and how much lighter than the theme's base."""

    hue: float
    lighter: float

    @property
    def style(self) -> str:
        """The variables that the class `stage` of page.css makes a background of."""
        return f"--h:{self.hue:g};--d:{self.lighter:g}"


def stage_color(stage: int, num_stages: int, pipeline: int, num_pipelines: int) -> StageColor:
    """Return the colour of a stage; `num_stages` is that of the longest pipeline."""
    apart = min(_WIDEST, _TWO_APART + 22.0 * (num_stages - 2))
    hue = (_FIRST_HUE - apart * stage / max(1, num_stages - 1)) % 360.0
    lighter = _ALTERNATE[stage % len(_ALTERNATE)] if num_stages > _MANY else 0.0
    if num_pipelines > 1:
        lighter += _PIPELINES * (pipeline / (num_pipelines - 1) - 0.5)
    return StageColor(round(hue, 1), round(lighter, 3))
