"""Host twin of kernels_cu/portable/send_words.cu: small data of the host, written by launches that carry it.

A launch takes its parameters with it, so nothing waits, no memory of the host must stay as it is, and a captured graph holds
the values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rawattn._compile.compiler import Source
from rawattn._kernels import params
from rawattn._kernels.params import WORDS_A_LAUNCH
from rawattn._kernels.source import source as _source

THREADS = 256


def source() -> Source:
    entry, file = "rawattn_send_words", "portable/send_words.cu"
    return _source(entry, file, "portable send_words", params.WORDS)


def launches(words: np.ndarray[Any, Any], to: int) -> list[bytes]:
    """The parameters of each launch that writes a part of `words` (uint32) to its place behind address `to`."""
    found = []
    for first in range(0, words.size, WORDS_A_LAUNCH):
        part = words[first : first + WORDS_A_LAUNCH]
        packed = params.WORDS.zeros()
        fields = packed[0]
        fields["to"], fields["count"] = to + 4 * first, part.size
        fields["words"][: part.size] = part
        found.append(packed.tobytes())
    return found
