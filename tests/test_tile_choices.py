"""bench/tile_choices.py: the shapes that it draws, the tiles that it forces, and the summary of times that it prints."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from bench import shapes, tile_choices
from bench.shapes import Shape
from rawattn._call.problem import Problem, describe
from rawattn._kernels.operands import Operands
from rawattn._kernels.sm90 import forward, tile_choice
from tests.problems import H200


def problem(shape: Shape) -> Problem:
    q, k = (
        np.broadcast_to(np.float16(0), (shape.batch, rows, heads, shape.headdim))
        for rows, heads in ((shape.rows, shape.nheads_q), (shape.seqlen_k, shape.nheads_kv))
    )
    return describe(q, k, k, causal=True)[0]


@pytest.mark.parametrize("keys", tile_choices.KEYS)
def test_what_is_drawn(keys: str) -> None:
    """Shapes are within the limits, have few and many rows alike, and are the same for the same seed."""
    drawn, again = (
        [tile_choices.draw(source, keys) for _ in range(200)]
        for source in (random.Random(3), random.Random(3))
    )
    assert drawn == again
    assert all(2e6 <= shape.nbytes <= 1.2e9 and shape.rows <= shape.seqlen_k for shape in drawn)
    assert sum(shape.rows < 64 for shape in drawn) > 40
    assert sum(shape.rows > 256 for shape in drawn) > 20


def test_which_tiles_are_timed() -> None:
    """Those that are expected to be about as quick as the quickest, which is among them."""
    few, chunk = Shape("rows", 8, 32, 4096, 40, 8, 128), Shape("rows", 1, 512, 8704, 32, 8, 128)
    for shape in (few, chunk):
        call = problem(shape)
        names = [[t.name for t in tile_choices.candidates(call, H200, x)] for x in (1, 1.2, 100)]
        assert len(names[0]) == 1 and len(names[1]) > 1
        assert set(names[0]) < set(names[1]) < set(names[2])
        fields, split = tile_choice.choose(call, H200)
        assert tile_choices.Tiles(fields, split).name in names[1]
    assert "192 x 64 split" in [t.name for t in tile_choices.candidates(problem(few), H200, 1)]
    short = tile_choices.candidates(problem(Shape("rows", 64, 200, 300, 8, 8, 64)), H200, 100)
    assert all(not tiles.split for tiles in short)
    assert any(tile_choice.blocks_of(tiles.fields) > 1 for tiles in short)


def test_tiles_are_forced() -> None:
    call = problem(Shape("rows", 8, 32, 4096, 40, 8, 128))
    for tiles in tile_choices.candidates(call, H200, 100):
        with tile_choices.forced(tiles):
            config = forward.choose(call, H200, Operands())
        assert tile_choices.Tiles(
            {"consumers": config.consumers, "tile_k": config.tile_k}, config.stream_k
        ).name == (tiles.name)


def test_what_is_said() -> None:
    one, two = (Shape("rows", 1, rows, 3000, 8, 2, 64) for rows in (40, 400))
    results = [
        (one, {"chosen": 2.0, "128 x 128": 2.0, "192 x 64 split": 1.0}),
        (two, {"chosen": 3.0, "128 x 128": 3.0}),
    ]
    first, worst, other = tile_choices.summary(results)
    assert first == "over the quickest tiles: 1.414 in the mean of 2, 1 above 1.05"
    assert worst.startswith("  2.00 ('rows', 1, 40, 3000, 8, 2, 64): chosen 2.0, 128 x 128 2.0")
    assert other.startswith("  1.00 ")
    assert tile_choices.summary([]) == ["Hopper's forward takes none of these calls"]


def test_a_limit_below_the_quickest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tile_choices.main(["--within", "0.9"])
    assert "--within: got 0.9, expected a number, at least 1" in capsys.readouterr().err


def test_calls_that_the_kernel_does_not_take_are_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [{}, {"chosen": 2.0, "128 x 128": 1.0}, {}, {"chosen": 2.0, "128 x 128": 1.0}]
    monkeypatch.setattr(tile_choices, "measure", lambda *_: found.pop(0))
    monkeypatch.setattr(shapes, "why_no_gpu", lambda: None)
    path = tmp_path / "new" / "shapes.json"
    assert tile_choices.main(["--shapes", "4", "--json", str(path)]) == 0
    shown = capsys.readouterr()
    assert "over the quickest tiles: 2.000 in the mean of 2" in shown.out
    assert shown.err.startswith("[1/4] ")
    assert [row["chosen"] for row in json.loads(path.read_text())] == [2.0] * 2
