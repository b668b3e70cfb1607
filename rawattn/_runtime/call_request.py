"""`CallRequest`: a call whose arguments have been read, ready for the dispatcher. Its arrays are not checked yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rawattn._call.options import Options
from rawattn._runtime.verbs import Verb

Result = TypeVar("Result")

# Returned by a repeat that has done nothing, since the call is not like the earlier one: it takes the slow path.
SLOW_PATH: Any = object()


@dataclass(frozen=True, slots=True)
class CallRequest(Generic[Result]):
    """A call as the dispatcher takes it.

    inputs: the verb's arrays. targets: for each output an array to write, or None. flag: see `Verb`.
    values: numbers of options for the kernels. returned: makes the caller's return value of the results.
    memo: that of the call's `BlockMask`, if it has one.
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
