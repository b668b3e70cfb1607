"""Language models of `transformers` that generate through pages, on the GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
# ruff: noqa: E402

from tests import paged_models

pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def _float32() -> None:
    """Keeps torch from using TF32 in its matrix products, so that logits are comparable."""
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_logits_are_those_of_the_model(name: str) -> None:
    paged_models.verify(name, "cuda")
