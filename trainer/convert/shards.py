"""How weights are shared out over files. Pure."""

from collections.abc import Sequence

MAX_SHARD_BYTES = 5_000_000_000


def plan_shards(sizes: Sequence[int], max_bytes: int) -> tuple[range, ...]:
    """Consecutive runs of tensors that stay within `max_bytes`; a larger tensor gets a file of its own."""
    shards: list[range] = []
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > max_bytes:
            shards.append(range(start, i))
            start, total = i, 0
        total += size
    return (*shards, range(start, len(sizes)))
