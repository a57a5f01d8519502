"""One pool of ranks for all tests that need several."""

from collections.abc import Iterator

import pytest
from dist.axes import MAX_RANKS
from dist.pool import Pool

# From here on a pool that grows with its meshes would start too often.
MANY_TESTS = 20


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """All ranks at once for a whole run; for a test or two, as many as they need."""
    shared = Pool(MAX_RANKS if len(request.session.items) >= MANY_TESTS else 0)
    yield shared
    shared.close()
