"""examples/dynamic_mask.py: what its mask keeps, and its command line."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rawattn

PATH = Path(__file__).resolve().parents[1] / "examples/dynamic_mask.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("rawattn_dynamic_mask", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load()


def test_blocks_that_matter_and_the_queries_own_are_kept() -> None:
    q, k, v, weights = context = example.make_context(1024, 128, np)
    scores = example.importance(context)
    mask = rawattn.topk_mask(scores, 128 + 64 * example.TOPICS)
    for head in range(example.HEADS_KV):
        means = (k[0, :896, head] @ weights[head]).reshape(-1, 64).mean(axis=1)
        blocks = np.flatnonzero(means > 3)
        assert len(blocks) == example.TOPICS
        expected = np.concatenate([*(np.arange(64) + 64 * b for b in blocks), np.arange(896, 1024)])
        np.testing.assert_array_equal(mask.kept[0, head, 0], expected)
    whole, part = (
        rawattn.attention(q, k, v, **options, causal=True, backend="cpu")
        for options in ({}, {"mask": mask})
    )
    assert abs(whole - part).max() < 0.1 < abs(whole).max()


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_example(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--keys", "2048", "--queries", "128", "--keep", "640")
    assert example.main(["--backend", backend, *sizes]) == 0
    said = capsys.readouterr().out
    assert f"640 keys kept; {backend}" in said
    assert said.count("8 blocks of the context: ") == example.HEADS_KV
    assert len(re.findall(r"^[.#+]{32}$", said, re.M)) == example.HEADS_KV
    share = re.search(r"have (\d+\.\d+)% of the probability", said)
    assert share is not None and 95 < float(share[1]) < 100
    assert ("without the mask" in said) == (backend == "cuda")


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        example.main(["--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "--keep N" in said and "seconds" in said
    for arguments, message in (
        (["--keys", "100"], "--keys: got 100, expected a multiple of 64"),
        (["--keep", "64"], "--keep: got 64, expected from 256"),
        (["--keep", "8192"], "expected from 256 (queries) to 4096 (keys)"),
        (["--keys", "128", "--queries", "256"], "--queries: got 256, expected at most 128 (keys)"),
    ):
        assert example.main(["--backend", "cpu", *arguments]) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    for name, wrong, least in (("keys", "0", 1), ("keys", "few", 1), ("seed", "-1", 0)):
        with pytest.raises(SystemExit):
            example.main([f"--{name}", wrong])
        message = f"argument --{name}: got {wrong}, expected a whole number, at least {least}"
        assert message in capsys.readouterr().err


def test_example_that_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(example, "make_context", interrupt)
    assert example.main(["--backend", "cpu"]) == 130
