"""Language models of `transformers` that generate through pages, on the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests import paged_models
from tests.transformers_models import one_thread

pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_logits_are_those_of_the_model(name: str) -> None:
    paged_models.verify(name, "cpu")
