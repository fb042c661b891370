"""What exporters say of plans that another framework cannot express."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tutti.errors import InputError


def assert_refused(framework: str, reason: str, export: Callable[[], object]) -> None:
    """Check that an export is refused in one line that names the framework and the reason."""
    with pytest.raises(InputError) as caught:
        export()
    message = str(caught.value)
    assert message.startswith(f"{framework}: ")
    assert "\n" not in message
    assert re.search(reason, message)
