"""bench/random_shapes.py: the shapes that it draws and the summary of times that it prints."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench import random_shapes, shapes
from bench.shapes import Shape
from rawattn._bench.grids import CUDNN


@pytest.mark.parametrize("keys", random_shapes.KEYS)
def test_what_is_drawn(keys: str) -> None:
    """Shapes are within the limits, have short and long lengths alike, and are the same for the same seed."""
    drawn, again = (
        [random_shapes.draw(source, keys) for _ in range(200)]
        for source in (random.Random(3), random.Random(3))
    )
    assert drawn == again
    assert all(2e5 <= shape.nbytes <= 3e8 for shape in drawn)
    assert all(shape.rows * shape.nheads_q // shape.nheads_kv <= 64 for shape in drawn)
    assert sum(shape.seqlen_k < 1000 for shape in drawn) > 50
    assert sum(shape.seqlen_k > 4000 for shape in drawn) > 20


def test_what_is_said() -> None:
    one, two = (Shape("rows", 1, rows, 300, 8, 2, 64) for rows in (1, 4))
    results = [
        (one, {"chosen": 2.0, "decode": 2.0, "forward": 1.0, CUDNN: 4.0}),
        (two, {"chosen": 3.0, "decode": 3.0, "forward": 6.0}),
    ]
    first, worst, other, theirs, _ = random_shapes.summary(results)
    assert first == "over the quicker kernel: 1.414 in the mean of 2, 1 above 1.02"
    assert worst.startswith("  2.00 ('rows', 1, 1, 300, 8, 2, 64): chosen 2.0, decode 2.0")
    assert other.startswith("  1.00 ")
    assert theirs == f"over {CUDNN}: 0.500 in the mean of 1, 0 above 1.02"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        random_shapes.main(["--keys", "all"])
    assert "invalid choice: 'all'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        random_shapes.main(["--shapes", "0"])
    assert "--shapes: got 0, expected a whole number" in capsys.readouterr().err


def test_times_are_written_where_there_is_no_folder_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"chosen": 2.0, "decode": 2.0, "forward": 1.0}
    monkeypatch.setattr(random_shapes, "measure", lambda shape: times)
    monkeypatch.setattr(shapes, "why_no_gpu", lambda: None)
    path = tmp_path / "new" / "shapes.json"
    assert random_shapes.main(["--shapes", "3", "--json", str(path)]) == 0
    shown = capsys.readouterr()
    assert "over the quicker kernel: 2.000 in the mean of 3" in shown.out
    assert shown.err.startswith("[1/3] ")
    assert [row["chosen"] for row in json.loads(path.read_text())] == [2.0] * 3
