"""Host twin of kernels_cu/portable/send_words.cu: small data of the host, written by launches that carry it.

A launch takes its parameters with it, so nothing waits, no memory of the host must stay as it is, and a captured graph holds
the values.
"""

from __future__ import annotations

import functools
import struct

from rawattn._compile.compiler import Source
from rawattn._kernels import helper_params, structs
from rawattn._kernels.helper_params import WORDS_A_LAUNCH
from rawattn._kernels.source import source as _source

THREADS = 256


@functools.cache
def source() -> Source:
    entry, file = "rawattn_send_words", "portable/send_words.cu"
    return _source(entry, file, "portable send_words", helper_params.WORDS)


_HEAD = struct.Struct("<Qi")  # to, count
_WORDS_AT = structs.offset(helper_params.WORDS, "words")
assert _HEAD.size == _WORDS_AT, "the words stand behind their count"
BYTES = helper_params.WORDS.dtype.itemsize  # of a launch's parameters
MOST = 4 * WORDS_A_LAUNCH  # bytes that a launch carries


def pack_into(parameters: bytearray, at: int, data: bytes, to: int) -> None:
    """Makes the parameters that begin there those of a launch which writes `data`, whole words of 4 bytes, to address `to`."""
    _HEAD.pack_into(parameters, at, to, len(data) // 4)
    at += _WORDS_AT
    parameters[at : at + len(data)] = data
