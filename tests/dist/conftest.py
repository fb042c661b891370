from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rank_pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """One pool for all tests of a session; its processes start when first asked for."""
    found = RankPool(8)
    yield found
    found.close()
