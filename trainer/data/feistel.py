"""A permutation of [0, n) that is computed, not stored.

A balanced Feistel network over the smallest even number of bits that holds n is a bijection of [0, 2^bits). Where it
leaves [0, n), it is applied again until it comes back ("cycle-walking", Black and Rogaway 2002); as 2^bits < 4n, that
takes fewer than four rounds on average. So the k-th sample of a shuffled epoch costs O(1) time and no memory, whatever
the number of samples, and an epoch needs no start-up.
"""

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 8
_ALL = (1 << 64) - 1

U64 = NDArray[np.uint64]


@lru_cache(maxsize=1024)
def round_keys(*, seed: int, source: int, epoch: int) -> tuple[int, ...]:
    """Eight 64-bit keys that depend on every bit of (seed, source, epoch), the same on every machine."""
    digest = hashlib.blake2b(f"pawl/order/{seed}/{source}/{epoch}".encode(), digest_size=8 * NUM_ROUNDS).digest()
    return tuple(int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8))


def _mix(x: U64) -> U64:
    """The finaliser of SplitMix64 (Steele et al. 2014): every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _half_bits(n: int) -> int:
    return max(1, ((n - 1).bit_length() + 1) // 2)


def _network(x: U64, keys: tuple[int, ...], half_bits: int) -> U64:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
    return (left << shift) | right


def permute_one(position: int, n: int, keys: tuple[int, ...]) -> int:
    """`permute` of a single position, in plain integers: ten times faster than arrays of one element."""
    assert 0 <= position < n
    half_bits = _half_bits(n)
    mask = (1 << half_bits) - 1
    place = position
    while True:
        left, right = place >> half_bits, place & mask
        for key in keys:
            x = right ^ key
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _ALL
            left, right = right, left ^ ((x ^ (x >> 31)) & mask)
        place = (left << half_bits) | right
        if place < n:
            return place


def permute(positions: NDArray[np.integer], n: int, keys: tuple[int, ...]) -> NDArray[np.int64]:
    """Where each position in [0, n) goes; a bijection of [0, n) for each set of keys.

    positions: any shape, all in [0, n). n < 2^62. Source: DESIGN §6 Data.
    """
    assert n > 0 and (positions.size == 0 or (positions.min() >= 0 and positions.max() < n))
    half_bits = _half_bits(n)
    flat = positions.astype(np.uint64).reshape(-1)
    with np.errstate(over="ignore"):
        flat = _network(flat, keys, half_bits)
        outside = np.flatnonzero(flat >= np.uint64(n))
        while outside.size:
            flat[outside] = _network(flat[outside], keys, half_bits)
            outside = outside[flat[outside] >= np.uint64(n)]
    return flat.astype(np.int64).reshape(positions.shape)
