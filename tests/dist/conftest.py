"""One pool of ranks for all tests that need several."""

from collections.abc import Iterator

import pytest
from dist.axes import MAX_RANKS
from dist.pool import Pool

# Two ranks that compile a layer for the first time need a core for a minute, which a busy machine does not give soon.
LIMIT_S = 300.0
# From here on a pool that grows with its meshes would start too often.
MANY_TESTS = 20


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """All ranks at once for a whole run; for a test or two, as many as they need."""
    shared = Pool(MAX_RANKS if len(request.session.items) >= MANY_TESTS else 0, timeout_s=LIMIT_S)
    yield shared
    shared.close()
