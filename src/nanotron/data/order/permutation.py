"""The order of windows: a keyed permutation computed on demand, in O(1) memory.

A permutation of [0, n) is an alternating Feistel network over the smallest power of two that holds n; an image that
falls outside [0, n) is sent through the network again until it lands inside (cycle walking, fewer than two rounds on
average). Nothing is stored, so a corpus of ten trillion tokens starts as fast as a toy one, and any index costs
microseconds. Every key is derived from names (seed, stage, source, epoch), never from a random state.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_NUM_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = (np.arange(1, _NUM_ROUNDS + 1, dtype=np.uint64) * _GOLDEN)[:, None]
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def derive_key(*parts: int | str) -> int:
    """A 64-bit key that depends on every part and on their order.

    The parts are written with their types and lengths, so ("ab", "c") and ("a", "bc") give different keys.
    """
    text = "".join(f"{type(part).__name__}:{len(str(part))}:{part};" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mix(words: _Words) -> _Words:
    """The finaliser of splitmix64: every input bit changes half of the output bits."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def _feistel(words: _Words, num_bits: int, keys: _Words) -> _Words:
    """One pass of the network: a bijection of [0, 2**num_bits), chosen by `keys` (one per word, or one for all)."""
    low_bits = np.uint64(num_bits - num_bits // 2)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << np.uint64(num_bits // 2)) - np.uint64(1)
    low, high = words & low_mask, words >> low_bits
    for number, round_keys in enumerate(_mix(keys + _ROUNDS)):
        if number % 2 == 0:
            low = low ^ (_mix(high ^ round_keys) & low_mask)
        else:
            high = high ^ (_mix(low ^ round_keys) & high_mask)
    return (high << low_bits) | low


def permute(indices: Indices, length: int, keys: int | _Words) -> Indices:
    """Where each index of [0, length) goes under the permutation that its key chooses."""
    if length < 2:
        return np.zeros_like(indices)
    num_bits = (length - 1).bit_length()
    words = indices.astype(np.uint64)
    keys = np.atleast_1d(np.asarray(keys, dtype=np.uint64))
    with np.errstate(over="ignore"):
        words = _feistel(words, num_bits, keys)
        outside = np.flatnonzero(words >= length)
        while outside.size:
            words[outside] = _feistel(words[outside], num_bits, keys if len(keys) == 1 else keys[outside])
            outside = outside[words[outside] >= length]
    return words.astype(np.int64)


def permute_in_blocks(indices: Indices, length: int, key: int, block: int) -> Indices:
    """Shuffle the order of blocks of `block` neighbours, and the neighbours inside each block.

    Reads then stay inside one block for `block` samples, which network file systems like. The incomplete last block,
    if any, stays last.

        block 3, length 8:  0 1 2 | 3 4 5 | 6 7   ->   5 3 4 | 0 2 1 | 7 6
    """
    num_full = length // block
    numbers, inside = np.divmod(indices, block)
    full = numbers < num_full
    images = np.where(full, permute(np.where(full, numbers, 0), num_full, key), num_full)
    with np.errstate(over="ignore"):
        keys = _mix(images.astype(np.uint64) * _GOLDEN ^ np.uint64(key))
    last = permute(np.where(full, 0, inside), length - num_full * block, keys)
    places: Indices = np.where(full, permute(np.where(full, inside, 0), block, keys), last)
    return images * block + places
