"""The reference's dropout: its random bits, and what it keeps."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from rawattn import SeqLayout, _philox, reference
from tests.reference_rules import (
    Options,
    arrays_of,
)


def test_philox_known_answers() -> None:
    """The vectors published with Random123."""
    for counter, key, expected in (
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            0xFFFFFFFF_FFFFFFFF,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ):
        assert tuple(int(word) for word in _philox.philox4x32(counter, key)) == expected


def test_random_bits_are_those_of_the_definition() -> None:
    """The random bits follow the definition in docs/notes/dropout.md, element by element."""
    seed, batch, head = 0x0123_4567_89AB_CDEF, 3, 5
    rows, keys = np.array([0, 1, 7, 8, 9, 15, 16, 40, 100_003]), np.arange(3, 45)
    bits = _philox.random16(seed, batch, head, rows, keys)
    for (i, row), (j, key) in itertools.product(enumerate(rows.tolist()), enumerate(keys.tolist())):
        counter = (4 * (key // 16) + key % 8 // 2, 8 * (row // 16) + row % 8, head, batch)
        words = _philox.philox4x32(counter, seed)
        word = int(words[2 * (key // 8 % 2) + row // 8 % 2])
        assert bits[i, j] == (word >> 16 if key % 2 else word & 0xFFFF)


def test_every_pair_has_bits_of_its_own() -> None:
    """Each call of the generator serves 8 pairs of a row and a key, and no two pairs have the same bits."""
    found: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
    for row, key in itertools.product(range(48), range(48)):
        call = (4 * (key // 16) + key % 8 // 2, 8 * (row // 16) + row % 8)
        half = (2 * (key // 8 % 2) + row // 8 % 2, key % 2)
        found.setdefault((*call, *half), []).append((row, key))
    assert all(len(pairs) == 1 for pairs in found.values())
    assert len({call[:2] for call in found}) == 48 * 48 // 8


@pytest.mark.parametrize("p", [0.0, 0.001, 0.1, 0.5, 0.9])
def test_kept_share(p) -> None:
    n = 2048
    kept = _philox.kept(42, p, 1, 2, np.arange(n), np.arange(n))
    deviation = math.sqrt(p * (1 - p)) / n
    assert abs(kept.mean() - (1 - p)) <= 5 * deviation + 2**-17
    for axis in (0, 1):  # every row and every key keeps the same share
        share = kept.mean(axis=axis)
        assert abs(share - (1 - p)).max() <= 6 * math.sqrt(p * (1 - p) / n) + 2**-17


def test_kept_sets_are_independent() -> None:
    rows = np.arange(512)
    base = _philox.kept(1, 0.5, 0, 0, rows, rows)
    others = [
        _philox.kept(2, 0.5, 0, 0, rows, rows),
        _philox.kept(1 + (1 << 32), 0.5, 0, 0, rows, rows),
        _philox.kept(1, 0.5, 1, 0, rows, rows),
        _philox.kept(1, 0.5, 0, 1, rows, rows),
        _philox.kept(1, 0.5, 0, 0, rows + 1, rows),
        _philox.kept(1, 0.5, 0, 0, rows, rows + 1),
        base.T,
    ]
    for other in others:
        assert abs((base == other).mean() - 0.5) <= 5 * 0.5 / 512
    for step in (1, 2, 8, 16):  # nor do neighbours agree more often than by chance
        for a, b in ((base[step:], base[:-step]), (base[:, step:], base[:, :-step])):
            assert abs((a == b).mean() - 0.5) <= 5 * 0.5 / 500


def test_seed_counts_modulo_two_to_the_64() -> None:
    rows = np.arange(64)
    np.testing.assert_array_equal(
        _philox.kept(-1, 0.5, 0, 0, rows, rows), _philox.kept(2**64 - 1, 0.5, 0, 0, rows, rows)
    )
    assert _philox.threshold(0.0) == 0 and _philox.threshold(math.nextafter(1, 0)) == 65535
    assert _philox.threshold(0.5) == 32768


def test_dropout_in_attention() -> None:
    q, k = np.zeros((2, 300, 2, 4)), np.zeros((2, 200, 1, 4))
    v = np.broadcast_to(np.eye(200)[None, :, None], (2, 200, 1, 200))
    p, seed = 0.25, 99
    plain, plain_lse = reference.attention(q, k, v, return_lse=True)
    out, lse = reference.attention(q, k, v, dropout_p=p, seed=seed, return_lse=True)
    np.testing.assert_array_equal(lse, plain_lse)
    for b, h in itertools.product(range(2), range(2)):
        kept = _philox.kept(seed, p, b, h, np.arange(300), np.arange(200))
        np.testing.assert_allclose(out[b, :, h], np.where(kept, plain[b, :, h] / (1 - p), 0))
    for same in (np.int32(seed), np.array(seed), np.array([seed], np.int32)):
        again = reference.attention(q, k, v, dropout_p=p, seed=same)
        np.testing.assert_array_equal(again, out)
    assert np.any(reference.attention(q, k, v, dropout_p=p, seed=seed + 1) != out)


def test_dropout_counts_positions_in_the_sequence() -> None:
    q, k, v = arrays_of()
    dropped: Options = {"dropout_p": 0.5, "seed": 4}
    out = reference.attention(q, k, v, **dropped)
    layout = SeqLayout(seqstart_q=[0, 5, 10], seqstart_k=[0, 7, 14])
    packed = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    grouped = reference.attention(*packed, seqs=layout, **dropped)
    np.testing.assert_array_equal(grouped.reshape(out.shape), out)
