"""A call as a verb's own function leaves it to others: checked as far as it is not arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rawattn._call.options import Options
from rawattn._runtime.verbs import Verb

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Asked(Generic[Result]):
    """A call as the dispatcher takes it, and what is given back, from the results.

    memo: of its mask, if that has one.
    """

    verb: Verb
    inputs: Sequence[Any]
    targets: Sequence[Any]
    options: Options
    flag: bool
    backend: Any
    values: tuple[int, ...]
    returned: Callable[[Sequence[Any]], Result]
    memo: dict[Any, Any] | None = None
