"""Hypothesis profiles: short by default, thorough with HYPOTHESIS_PROFILE=thorough."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
settings.register_profile("default", max_examples=150, **_COMMON)
settings.register_profile(
    "thorough", max_examples=5000, **{**_COMMON, "derandomize": False, "print_blob": True}
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
