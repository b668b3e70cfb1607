"""Which family of kernels a call takes."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn._call.options import ArrayForm
from rawattn._call.pages import PageForm
from rawattn._call.problem import Problem, describe
from rawattn._kernels import registry
from rawattn._kernels.operands import Operands
from rawattn._kernels.sm90 import forward as sm90_forward
from tests.problems import CALL_OF_MANY, H200


@pytest.mark.parametrize(
    ("rows", "keys", "batch", "heads", "dtype", "family"),
    [
        (1, 8192, 1, (32, 8), "float16", "decode"),
        (1, 1024, 64, (32, 32), "float16", "decode"),
        (4, 2048, 64, (32, 8), "float16", "decode"),
        (5, 2048, 64, (32, 8), "float16", "sm90"),  # 20 rows share keys
        (1, 1023, 64, (32, 8), "float16", "sm90"),
        (2, 128, 16, (32, 8), "float16", "decode"),  # few streams of keys, and few rows
        # One query of many heads: its forward is the faster kernel on short keys of many streams.
        (1, 96, 132, (16, 2), "float16", "decode"),
        (1, 511, 133, (16, 2), "float16", "sm90"),
        (1, 512, 133, (16, 2), "float16", "decode"),
        (1, 1023, 133, (18, 2), "float16", "sm90"),
        (1, 1024, 133, (18, 2), "float16", "decode"),
        (3, 511, 16, (32, 8), "float16", "sm90"),
        (8, 1023, 1, (32, 8), "float16", "sm90"),
        (3, 2047, 1, (64, 8), "float16", "sm90"),
        (3, 2047, 8, (64, 8), "float16", "sm90"),
        (16, 8192, 1, (64, 8), "float16", "sm90"),
        (16, 128, 1, (64, 8), "float32", "decode"),
        (64, 128, 1, (64, 8), "float32", "portable"),
        # The forward has all query heads of a kv head in one tile.
        (1, 4096, 32, (32, 1), "float16", "sm90"),
        (2, 4096, 32, (71, 1), "float16", "sm90"),
        (2, 128, 32, (71, 1), "float16", "sm90"),
        # Where the sequences fill the GPU, the forward takes the heads of a GQA group as rows of one head.
        (1, 4096, 98, (71, 1), "float16", "sm90"),
        (1, 4096, 99, (71, 1), "float16", "sm90"),
        (1, 4096, 50, (142, 2), "float16", "sm90"),
        (1, 4096, 99, (71, 1), "float32", "decode"),
        (2, 2048, 16, (48, 1), "float16", "sm90"),
        (4, 2048, 16, (48, 1), "float16", "sm90"),
        (64, 4096, 32, (71, 1), "float16", "sm90"),
        (2, 4096, 2, (71, 1), "float32", "decode"),
        (16, 4096, 2, (71, 1), "float32", "portable"),
    ],
)
def test_few_rows_on_many_keys_are_decoded(
    rows: int, keys: int, batch: int, heads: tuple[int, int], dtype: str, family: str
) -> None:
    def array(seqlen: int, nheads: int) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), (batch, seqlen, nheads, 128))

    q, k = array(rows, heads[0]), array(keys, heads[1])
    problem, _ = describe(q, k, k, causal=True)
    assert registry.choose("attention", problem, H200, Operands()).name == family


@pytest.mark.parametrize(
    ("rows", "keys", "batch", "headdim", "family"),
    [
        (1, 4096, 66, 64, "decode"),
        (1, 4096, 67, 64, "sm90"),
        (2, 4096, 4, 64, "sm90"),
        (1, 4096, 11, 96, "decode"),
        (1, 4096, 12, 96, "sm90"),
    ],
)
def test_many_heads_of_few_columns(
    rows: int, keys: int, batch: int, headdim: int, family: str
) -> None:
    problem = replace(CALL_OF_MANY, batch=batch, headdim=headdim, headdim_v=headdim)
    problem = replace(problem, rows_q=rows, rows_k=keys, max_seqlen_q=rows, max_seqlen_k=keys)
    assert registry.choose("attention", problem, H200, Operands()).name == family


@pytest.mark.parametrize(
    ("rows", "keys", "batch", "heads", "family"),
    [
        (1, 200, 16, (16, 16), "decode"),
        (1, 1023, 64, (32, 8), "decode"),
        (16, 8192, 1, (32, 8), "decode"),
        (16, 8192, 16, (32, 8), "sm90"),
        (64, 8192, 1, (32, 8), "sm90"),
    ],
)
def test_few_rows_under_a_mask(
    rows: int, keys: int, batch: int, heads: tuple[int, int], family: str
) -> None:
    """More calls are decoded under a mask than without, because the forward would first have to make lists of tiles."""
    shapes = (batch, rows, heads[0], 128), (batch, keys, heads[1], 128)
    q, k = (np.broadcast_to(np.zeros((), np.float16), shape) for shape in shapes)
    problem, _ = describe(q, k, k, causal=True)
    shape = batch, heads[1], rows, keys
    problem = replace(problem, mask=ArrayForm("bool", shape, shape))
    chosen = registry.choose("attention", problem, H200, Operands())
    assert chosen.name == family
    if family == "sm90":
        assert sm90_forward.choose(problem, H200, Operands()).stream_k == (batch == 1)


@pytest.mark.parametrize(("keys", "family"), [(447, "sm90"), (448, "decode")])
def test_few_rows_under_a_mask_of_keys(keys: int, family: str) -> None:
    """Decoding needs the mask packed into bits, so the forward takes calls with a mask of few keys."""
    problem = replace(CALL_OF_MANY, nheads_q=4, nheads_kv=4, rows_k=keys, max_seqlen_k=keys)
    problem = replace(problem, headdim=64, headdim_v=64)
    shape = 1, 1, 1, keys
    masked = replace(problem, mask=ArrayForm("bool", shape, shape))
    assert registry.choose("attention", masked, H200, Operands()).name == family


@pytest.mark.parametrize(
    ("rows", "keys", "batch", "heads", "headdim", "family"),
    [
        (1, 100, 64, (32, 8), 128, "decode"),
        (4, 2000, 128, (32, 8), 256, "decode"),
        (5, 2000, 16, (32, 8), 128, "sm90"),
        (5, 2000, 16, (32, 8), 64, "decode"),
        (5, 2000, 17, (32, 8), 64, "sm90"),
        (8, 9000, 2, (32, 8), 128, "sm90"),
    ],
)
@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "softcap"])
def test_few_rows_whose_scores_change(
    rows: int, keys: int, batch: int, heads: tuple[int, int], headdim: int, family: str, name: str
) -> None:
    """More calls are decoded if options change scores: that costs the forward more, since its tiles have more rows."""
    assert family_where_scores_change(name, rows, keys, batch, heads, headdim) == family


@pytest.mark.parametrize(
    ("name", "headdim", "rows", "heads", "batch", "least"),
    [
        ("bias", 128, 4, (32, 4), 25, 600),
        ("bias", 64, 4, (32, 4), 50, 752),
        ("bias", 192, 2, (48, 4), 25, 600),
        ("float32 bias", 128, 4, (32, 4), 25, 150),
        ("alibi_slopes", 128, 4, (32, 4), 25, 1200),
        ("alibi_slopes", 64, 4, (32, 4), 50, 1250),
    ],
)
def test_rows_of_many_heads_whose_scores_change_by_head(
    name: str, headdim: int, rows: int, heads: tuple[int, int], batch: int, least: int
) -> None:
    """Each head takes 16 rows of the forward's tile. Decoding has several heads' rows there, if there are keys enough."""
    below, enough = (
        family_where_scores_change(name, rows, keys, batch, heads, headdim)
        for keys in (least - 8, least)
    )
    assert (below, enough) == ("sm90", "decode")


def test_rows_that_fill_tiles_of_the_forward_where_scores_change() -> None:
    family = functools.partial(family_where_scores_change, keys=4096, batch=50, headdim=128)
    assert family("bias", rows=4, heads=(16, 2)) == "decode"
    assert family("bias", rows=8, heads=(16, 2)) == "sm90"
    assert family("softcap", rows=4, heads=(16, 2)) == "sm90"
    # Twelve heads fill 192 rows. Where TMA cannot copy the bias, decoding is faster still.
    assert family("bias", rows=4, heads=(24, 2)) == "sm90"
    assert family("bias", rows=4, heads=(24, 2), keys=4097) == "decode"
    assert family("bias", rows=2, heads=(24, 2), headdim=192) == "decode"
    assert family("bias", rows=4, heads=(16, 2), headdim=192) == "sm90"
    assert family("bias", rows=2, heads=(32, 2), headdim=256) == "sm90"


def family_where_scores_change(
    name: str, rows: int, keys: int, batch: int, heads: tuple[int, int], headdim: int
) -> str:
    """The family of kernels that a call with this option takes; a bias is of each head."""
    shapes = (batch, rows, heads[0], headdim), (batch, keys, heads[1], headdim)
    q, k = (np.broadcast_to(np.zeros((), np.float16), shape) for shape in shapes)
    problem, _ = describe(q, k, k, causal=True)
    shape = batch, heads[0], rows, keys
    options: dict[str, Any] = {
        "bias": ArrayForm("float16", shape, shape),
        "float32 bias": ArrayForm("float32", shape, shape),
        "alibi_slopes": ArrayForm("float32", (1, heads[0]), (1, heads[0])),
        "softcap": 30.0,
    }
    problem = replace(problem, **{name.removeprefix("float32 "): options[name]})
    return registry.choose("attention", problem, H200, Operands()).name


def family_of(
    batch: int, rows: int, keys: int, page_size: int, num_pages: int = 4096, **changed: Any
) -> str:
    """The family of kernels that a call on pages takes."""
    pages = PageForm(page_size, num_pages, -(-keys // page_size), False, "int32")
    fields: dict[str, Any] = {
        **{"dtype": "bfloat16", "batch": batch, "nheads_q": 32, "nheads_kv": 8, "headdim": 128},
        **{"headdim_v": 128, "packed": False, "rows_q": rows, "rows_k": keys, "max_seqlen_q": rows},
        **{"max_seqlen_k": keys, "ragged": True, "window_left": None, "window_right": 0, "sink": 0},
        **{"top_left": False, "scale": 1.0, "pages": pages, **changed},
    }
    problem = Problem(**fields)
    row = 32 * 128 * 2
    strides = {"q": (rows * row, row, 256, 2), "k_pages": (page_size * row // 4, row // 4, 256, 2)}
    operands = Operands({**strides, "v_pages": strides["k_pages"], "out": strides["q"]})
    return registry.choose("paged_attention", problem, H200, operands).name


def family_in_rows_or_pages(
    paged: bool, batch: int, rows: int, keys: int, headdim: int, softcap: float | None = None
) -> str:
    """The family of kernels that a causal call of 32 heads on 8 takes, of keys in rows or in pages of 16."""
    if paged:
        dims = {"headdim": headdim, "headdim_v": headdim}
        return family_of(batch, rows, keys, 16, **dims, softcap=softcap)
    shapes = (batch, rows, 32, headdim), (batch, keys, 8, headdim)
    q, k = (np.broadcast_to(np.zeros((), np.float16), shape) for shape in shapes)
    problem, _ = describe(q, k, k, causal=True)
    return registry.choose("attention", replace(problem, softcap=softcap), H200, Operands()).name


@pytest.mark.parametrize(
    ("rows", "keys", "headdim", "family"),
    [
        # rows, four heads on a kv head each
        (1, 300, 256, "decode"),
        (4, 511, 256, "sm90"),
        (4, 512, 256, "decode"),
        (4, 100, 128, "decode"),
        (8, 767, 64, "sm90"),
        (8, 768, 64, "decode"),
    ],
)
def test_few_rows_on_pages(rows: int, keys: int, headdim: int, family: str) -> None:
    dims = {"headdim": headdim, "headdim_v": headdim}
    assert family_of(4, rows, keys, 16, **dims) == family


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("rows", "keys", "batch", "headdim", "decoded"),
    [
        # rows, four heads on a kv head each; decoded: in rows, in pages
        (5, 700, 16, 64, (False, False)),  # 128 streams
        (5, 700, 17, 64, (False, True)),
        (8, 1024, 17, 64, (True, True)),
        (8, 20_000, 17, 64, (True, True)),
        (9, 1024, 17, 64, (False, False)),
        (5, 2047, 17, 96, (False, False)),
        (5, 2048, 17, 96, (True, True)),
        (5, 4096, 17, 128, (False, False)),
        # few streams of many keys
        (6, 20_000, 4, 64, (True, True)),
        (6, 20_000, 4, 96, (False, True)),
        (6, 20_000, 4, 128, (False, False)),
        (9, 20_000, 4, 64, (False, False)),
    ],
)
def test_wide_tiles_of_many_streams(
    rows: int, keys: int, batch: int, headdim: int, decoded: tuple[bool, bool], paged: bool
) -> None:
    family = family_in_rows_or_pages(paged, batch, rows, keys, headdim)
    assert family == ("decode" if decoded[paged] else "sm90")


@pytest.mark.parametrize(
    ("changed", "keys", "batch", "headdim", "decoded"),
    [
        # eight rows of four heads on each of eight kv heads
        ("softcap", 512, 17, 64, True),
        ("softcap", 511, 17, 64, False),
        ("softcap", 4096, 17, 72, False),
        ("mask", 512, 17, 64, True),
        ("bias", 4096, 17, 64, False),
        ("softcap", 20_000, 16, 128, True),
        ("mask", 20_000, 16, 128, True),
        ("bias", 8192, 16, 64, True),
        ("bias", 8193, 16, 64, False),
    ],
)
def test_wide_tiles_with_changed_scores(
    changed: str, keys: int, batch: int, headdim: int, decoded: bool
) -> None:
    options = {
        "softcap": 20.0,
        "mask": ArrayForm("bool", (1, 1, 8, keys), (0, 0, keys, 1)),
        "bias": ArrayForm("bfloat16", (1, 1, 8, keys), (0, 0, 2 * keys, 2)),
    }
    dims = {"headdim": headdim, "headdim_v": headdim, changed: options[changed]}
    assert family_of(batch, 8, keys, 16, **dims) == ("decode" if decoded else "sm90")


@pytest.mark.parametrize(
    ("softcap", "rows", "keys", "batch", "headdim", "decoded"),
    [
        # rows, four heads on each of eight kv heads; decoded: in rows, in pages
        (None, 9, 8192, 1, 64, (True, True)),
        (None, 9, 2048, 2, 64, (True, True)),
        (None, 9, 2049, 2, 64, (False, True)),
        (None, 9, 4096, 2, 128, (False, False)),
        (20.0, 9, 4097, 2, 64, (True, True)),
        (20.0, 9, 6250, 2, 128, (False, True)),
        (20.0, 9, 6251, 2, 128, (False, False)),
        (20.0, 9, 12_500, 1, 128, (False, True)),
        (20.0, 17, 2048, 1, 128, (False, False)),
        (20.0, 8, 511, 2, 128, (False, True)),  # a wide tile
        (20.0, 8, 512, 2, 128, (True, True)),
        (20.0, 9, 2048, 5, 128, (False, False)),  # 40 streams
    ],
)
@pytest.mark.parametrize("paged", [False, True])
def test_rows_of_few_streams(
    softcap: float | None,
    rows: int,
    keys: int,
    batch: int,
    headdim: int,
    decoded: tuple[bool, bool],
    paged: bool,
) -> None:
    family = family_in_rows_or_pages(paged, batch, rows, keys, headdim, softcap)
    assert family == ("decode" if decoded[paged] else "sm90")


@pytest.mark.parametrize(
    ("heads", "rows", "keys", "batch", "headdim", "softcap", "decoded"),
    [
        # rows, heads on each of eight kv heads; sixteen sequences have 128 streams
        (8, 3, 511, 16, 128, None, False),
        (8, 3, 512, 16, 128, None, True),
        (8, 3, 96, 17, 128, None, True),
        (8, 3, 95, 17, 128, None, False),
        (8, 3, 4096, 16, 136, None, False),
        (8, 4, 4096, 17, 128, None, False),
        (8, 4, 512, 17, 64, None, True),
        (8, 4, 1024, 17, 128, 20.0, True),
        (8, 4, 1023, 17, 128, 20.0, False),
        (8, 5, 8192, 16, 64, 20.0, False),
        (16, 4, 512, 16, 128, None, True),
        (16, 4, 200, 16, 128, None, False),
        (16, 2, 64, 17, 128, None, True),
        (16, 4, 64, 17, 64, None, True),
        (16, 4, 1023, 17, 128, None, False),
        (16, 4, 1024, 17, 128, None, True),
        (16, 4, 64, 41, 96, None, False),  # 328 streams
        (16, 4, 64, 42, 96, None, True),
        (16, 5, 8192, 17, 128, None, False),
        (7, 3, 200, 16, 256, None, True),  # the forward takes a tile for each head
        (4, 5, 12_500, 1, 256, None, True),
        (4, 5, 12_501, 1, 256, None, False),
        (4, 5, 2048, 2, 256, None, False),  # 16 streams
        (4, 5, 1023, 1, 256, None, False),
        (4, 13, 2048, 1, 256, None, False),
    ],
)
def test_rows_of_float8(
    heads: int, rows: int, keys: int, batch: int, headdim: int, softcap: float | None, decoded: bool
) -> None:
    dims = {"headdim": headdim, "headdim_v": headdim, "nheads_q": 8 * heads}
    family = family_of(batch, rows, keys, 16, **dims, softcap=softcap, float8=True)
    assert family == ("decode" if decoded else "sm90")
    if headdim == 128 and rows * heads == 24 and decoded:
        bias = ArrayForm("bfloat16", (1, 1, 1, keys), (0, 0, 0, 2))
        plain = family_of(batch, rows, keys, 16, **dims, softcap=softcap, bias=bias)
        assert family_of(batch, rows, keys, 16, **dims, float8=True, bias=bias) == plain


def test_a_call_imports_what_it_asks_alone() -> None:
    """What Python takes to make the classes of other families is most of the first call's time."""
    program = """
import sys
import numpy as np
from rawattn._call.problem import describe
from rawattn._kernels import registry
from rawattn._kernels.operands import Operands
from rawattn._kernels.target import without_device
q = np.broadcast_to(np.float16(0), (1, 1024, 16, 64))
problem, _ = describe(q, q, q, causal=True)
assert registry.choose("attention", problem, without_device("sm_90a"), Operands()).name == "sm90"
family = "rawattn._kernels."
print(*(name.removeprefix(family) for name in sys.modules if name.startswith(family)))
"""
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = set(run.stdout.split())
    assert "sm90.forward_steps" in found
    others = {"portable.backward", "portable.forward", "portable.decode", "sm90.decode"}
    others |= {"portable.combine", "portable.append", "gathered", "aligned_bias"}
    assert not others & found


def test_which_kernels_read_pages() -> None:
    assert family_of(64, 1, 8192, 16) == "decode"
    assert family_of(8, 512, 8192, 16) == "sm90"
    assert family_of(8, 512, 8192, 1000) == "sm90"
    assert family_of(8, 512, 8192, 16, dtype="float32") == "portable"
    # No TMA box divides these pages: the forward copies their rows.
    assert family_of(8, 512, 8192, 12) == "sm90"
    assert family_of(8, 512, 8192, 1) == "sm90"
    # Offsets of copied rows have 32 bits, in units of 16 bytes.
    assert family_of(8, 512, 8192, 1, num_pages=2**25) == "sm90"
    assert family_of(8, 512, 8192, 1, num_pages=2**26) == "portable"
    assert family_of(8, 512, 8192, 16, num_pages=2**26) == "sm90"
    # These tiles leave most of the GPU idle. With many keys they are split among blocks.
    assert family_of(1, 256, 32768, 16) == "sm90"
    assert family_of(1, 64, 32768, 16) == "sm90"
    assert family_of(1, 64, 1000, 16) == "sm90"
    assert family_of(8, 512, 8192, 16, num_splits=2) == "portable"


_FOLDED = {"ragged", "right", "scale_first", "softcap", "paged", "float8"}
_GATHERED = {"left", "right", "top_left", "positions", "block_mask", "scale_first", "softcap"}
_GATHERED |= {"sink_logits", "paged", "float8"}
# All features. A new one fails the test below until it is decided which families have code for it.
_FEATURES = {"ragged", "packed", "bias", "bias_pairs", "bias_chunks", "alibi", "one_sided"}
_FEATURES |= {"score_mod", "mod_line", "dropout", *_GATHERED}
_WITHOUT: dict[tuple[str, str], set[str]] = {
    ("attention", "portable"): set(),
    ("attention", "sm90"): set(),
    ("attention", "decode"): {"dropout"},
    ("attention", "aligned_bias"): {"paged"},
    ("attention_backward", "portable"): {"paged"},
    ("attention_backward", "aligned_bias"): {"paged"},
}


@pytest.mark.parametrize("verb", ["attention", "attention_backward"])
def test_what_each_family_has_code_for(verb: str) -> None:
    for candidate in registry.CANDIDATES[verb]:
        family = candidate.load()
        accepted = [_FEATURES - _WITHOUT.get((verb, family.name), _FEATURES)]
        accepted += {"gathered": [_GATHERED], "sm90": [_FOLDED]}.get(family.name, [])
        assert family.features in accepted, family.name
