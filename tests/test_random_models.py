"""bench/random_models.py: the shapes that it draws and the summary of times that it prints."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench import random_models, shapes
from rawattn._bench.model_cases import Model

ENCODER = Model("encoder", 4, 200, 200, 12, 12, 64, 64, False)
CHUNK = Model("chunk", 1, 200, 9000, 32, 8, 128, 128, True)


def test_what_is_drawn() -> None:
    """Shapes are within the limits, of all kinds, and are the same for the same seed."""
    drawn, again = (
        [random_models.draw(source) for _ in range(300)]
        for source in (random.Random(3), random.Random(3))
    )
    assert drawn == again
    assert {each.kind for each in drawn} == set(random_models._KINDS)
    for each in drawn:
        q, k, _ = each.shapes
        assert each.nheads_q % each.nheads_kv == 0 and (q[1], k[1]) == (each.rows, each.keys)
        assert each.rows <= each.keys or not each.causal
    assert sum(each.headdim % 16 > 0 for each in drawn) > 10


def test_what_is_said() -> None:
    results = [
        (CHUNK, {"rawattn": 3.0, "cuDNN": 2.0, "FA4": 4.0}),
        (ENCODER, {"rawattn": 1.0, "cuDNN": 2.0}),
    ]
    first, worst, other = random_models.summary(results)
    assert first == "over the fastest peer: 1.00 in the median of 2, 1 above 1"
    assert worst == f"  1.50 {CHUNK.name}: rawattn 3.0, cuDNN 2.0, FA4 4.0 us"
    assert other.startswith("  0.50 encoder 4 x 200 ")
    assert random_models.summary([]) == ["no peer makes these calls"]


def test_shapes_without_peers_are_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [({"rawattn": 1.0}, ["none"]), ({"rawattn": 1e-6, "cuDNN": 2e-6}, [])]
    monkeypatch.setattr(random_models.models, "sides", lambda *_: None)
    monkeypatch.setattr(random_models.graph_peers, "seconds", lambda *_: found.pop(0))
    monkeypatch.setattr(shapes, "why_no_gpu", lambda: None)
    path = tmp_path / "shapes.json"
    assert random_models.main(["--shapes", "2", "--json", str(path)]) == 0
    assert "0.50 in the median of 1, 0 above 1" in capsys.readouterr().out
    (row,) = json.loads(path.read_text())
    assert (row["rawattn"], row["cuDNN"]) == (1.0, 2.0) and row["kind"] in random_models._KINDS
