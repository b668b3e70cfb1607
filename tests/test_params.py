"""Parameter structs: declared once, in Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rawattn._call.problem import describe
from rawattn._call.structure import structure
from rawattn._compile import compiler
from rawattn._kernels import (
    attention_params,
    helper_params,
    params,
    params_header,
    registry,
    structs,
)
from rawattn._kernels.features import Features, constant
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import ragged_setup
from rawattn._kernels.target import without_device

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(("name", "text"), params_header.texts().items(), ids=params_header.texts())
def test_the_kernels_structs_are_generated_from_the_declarations(name: str, text: str) -> None:
    folder = Path("kernels_cu", "attn")
    generated = (ROOT / folder / name).read_text("utf-8")
    assert generated == text, f"run python -m rawattn._kernels.params_header {folder}"


def test_a_struct_that_is_laid_out_otherwise_does_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cupy")
    monkeypatch.setenv("RAWATTN_CACHE_DIR", str(tmp_path))
    good = ragged_setup.source()
    compiler.compile_source(good, "sm_80")
    at = structs.offset(helper_params.SETUP, "schedules")
    changed = good.text.replace(f"schedules) == {at}", f"schedules) == {at + 4}")
    assert changed != good.text
    bad = compiler.Source(good.entry, changed, "changed")
    with pytest.raises(compiler.CompileError, match="the host lays it out so"):
        compiler.compile_source(bad, "sm_80")


def test_scalars_of_the_problem_find_their_fields_by_name() -> None:
    q, k = (np.broadcast_to(np.float16(0), shape) for shape in ((2, 5, 4, 16), (2, 7, 2, 16)))
    problem, lengths = describe(q, k, k, causal=True, window=(3, None), sink=2, scale=0.5)
    operands = Operands(dict.fromkeys(("q", "k", "v", "out"), (640, 128, 32, 2)))
    values = attention_params.forward(problem, structure(lengths), operands, 1 << 20)
    filled = np.frombuffer(structs.fill(params.FORWARD, values), params.FORWARD.dtype)[0]
    assert filled["mask"].item() == (3, 0, 2)
    assert filled["scores"]["scale"] == 0.5
    assert (filled["batch"], filled["nheads_q"], filled["nheads_kv"]) == (2, 4, 2)
    assert filled["q_strides"].item() == (320, 64, 16)


def test_constants_are_named_by_their_fields() -> None:
    assert [constant(name) for name in ("tile_q", "top_left", "headdim_v")] == [
        "kTileQ",
        "kTopLeft",
        "kHeadDimV",
    ]


def test_features_are_off_by_default() -> None:
    assert not any(Features().known_to(Features).values())
    assert not Features().active()


def test_a_family_is_asked_for_no_feature_that_it_does_not_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = np.broadcast_to(np.float16(0), (2, 5, 4, 16))
    problem, _ = describe(q, q, q, causal=True)
    hopper, operands = without_device("sm_90a"), Operands()

    def chosen() -> str:
        return registry.choose("attention", problem, hopper, operands).name

    assert chosen() == "sm90"

    def without_right(candidate: registry.Candidate) -> registry.Candidate:
        family = candidate.load()
        fewer = family._replace(features=family.features - {"right"})
        return candidate._replace(load=lambda: fewer)

    *others, last = registry.CANDIDATES["attention"]
    fewer = tuple(without_right(candidate) for candidate in others)
    monkeypatch.setitem(registry.CANDIDATES, "attention", (*fewer, last))
    assert chosen() == "portable"
    monkeypatch.setitem(registry.CANDIDATES, "attention", (*fewer, without_right(last)))
    with pytest.raises(NotImplementedError, match=r"^right: no kernel of attention has it"):
        chosen()


def test_pages_are_found_by_a_multiplication() -> None:
    """The multiplication of `quotient` (kernels_cu/tile/rows.cuh) finds the page of rows below 2^31, for every page size."""
    rng = np.random.default_rng(0)
    for size in range(1, 1025):
        inverse, shift = attention_params.division(size)
        assert inverse < 2**32
        last = (2**31 - 1) // size * size
        ends = [0, size - 1, size, size + 1, last - 1, last, 2**31 - 1]
        for row in (*ends, *map(int, rng.integers(0, 2**31, 20))):
            assert (2 * row * inverse >> 32) >> shift == row // size
