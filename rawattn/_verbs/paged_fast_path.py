"""Fast path of repeated calls on pages: decoding steps whose lengths and page ids are on the GPU, where kernels read them.

The counterpart of `fast_path`, which handles layouts. Here the lengths are one more array of the call, so the form of the
arrays and the values of the options are the whole key.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from rawattn._call.argument_kinds import argument_kinds, check_arguments
from rawattn._interop import dynamo
from rawattn._interop.arrays import framework_of
from rawattn._interop.native import Read, native_of
from rawattn._interop.written import bump_versions
from rawattn._kernels.selection import UNCHANGED, selection
from rawattn._runtime import dispatch, read_lengths
from rawattn._runtime.call_request import SLOW_PATH, CallRequest
from rawattn._verbs.fast_path import (
    Parameters,
    are_plain,
    closures_by_call,
    remember_call,
    with_signature_of,
)

Result = TypeVar("Result")


class Gathered(NamedTuple):
    """The arguments of a call, arrays apart from options.

    arrays: in the verb's order; then seqlen_k, and the indptr if the block table is a pair. out: the array to write, or None.
    options: the other arguments by name, and under "" which optional arrays are given.
    """

    arrays: tuple[Any, ...]
    out: Any
    options: dict[str, Any]


def with_fast_path(
    gather: Callable[[tuple[Any, ...], dict[str, Any]], Gathered | None],
    written: tuple[int, ...] = (),
) -> Callable[[Callable[Parameters, CallRequest[Result]]], Callable[Parameters, Result]]:
    """Decorator: turns a verb's own function, which returns a `CallRequest`, into the public function, with a fast path.

    gather: gathers the arguments of a call, or returns None if the call has no fast path.
    written: the indices of arrays that a call changes, among the gathered ones.
    """

    def decorate(read_call: Callable[..., CallRequest[Result]]) -> Callable[..., Result]:
        name = read_call.__name__
        kinds = argument_kinds(f"rawattn.{name}", inspect.signature(read_call))
        # By the type of the first array and the number of arrays.
        readers: dict[tuple[type, int], Callable[..., Read | None]] = {}

        @functools.wraps(read_call)
        def call(*args: Any, **options: Any) -> Result:
            gathered = gather(args, options)
            key = read = None
            if gathered is not None:
                arrays, out, others = gathered
                if out is not None:
                    arrays = (*arrays, out)
                reader = readers.get((type(arrays[0]), len(arrays)))
                read = None if reader is None else reader(*arrays)
            if read is not None:
                addresses, form, tracked = read
                try:
                    # Launches depend on each array's address modulo 16. form[-1], all addresses OR-ed, is 0 if all are aligned.
                    alignments = tuple([x & 15 for x in addresses]) if form[-1] else None
                    values = tuple(others.values())
                    types = [type(x) for x in values]
                    types += [type(end) for x in values if type(x) is tuple for end in x]
                    key = form, alignments, out is None, *others, values, *types
                    repeat = closures_by_call[name].get(key)
                except TypeError:  # an option that cannot be hashed
                    repeat = key = None
                if repeat is not None and not tracked and selection() is UNCHANGED:
                    result = repeat(addresses, out)
                    if result is not SLOW_PATH:
                        if out is not None:
                            bump_versions(out)
                        if written:
                            bump_versions(*[arrays[n] for n in written])
                        return result  # type: ignore[no-any-return]
            return slow_path(args, options, gathered, key)

        @dynamo.untraced
        def slow_path(
            args: tuple[Any, ...], options: dict[str, Any], gathered: Gathered | None, key: Any
        ) -> Result:
            check_arguments(kinds, args, options)
            request = read_call(*args, **options)
            call = request.verb, request.inputs, request.targets, request.options, request.flag
            results = dispatch.run(*call, request.backend, request.values)
            framework = framework_of(request.inputs[request.verb.lead_index])
            native = native_of(framework)
            if (
                gathered is None
                or native is None
                or selection() is not UNCHANGED
                or request.backend == "cpu"
            ):
                return request.returned(results)
            arrays, out, others = gathered
            if out is not None:
                arrays = (*arrays, out)
            form = type(arrays[0]), len(arrays)
            if form not in readers and form[0] in native.kinds:
                readers[form] = native.reader(form[1])
            elif key is not None and are_plain(others, ""):
                repeat = read_lengths.repeated(native, request, arrays, framework)
                if repeat is not None:
                    remember_call(closures_by_call[name], key, repeat)
            return request.returned(results)

        closures_by_call[name] = {}
        return with_signature_of(call, read_call)

    return decorate


def of_paged_attention(args: tuple[Any, ...], options: dict[str, Any]) -> Gathered | None:
    """q, k_pages, v_pages, block_table come by position, seqlen_k by name. None with `seqs` or `validate`."""
    if (
        len(args) != 4
        or options.get("seqs") is not None
        or options.get("validate", False) is not False
    ):
        return None
    others = {**options}
    out, lengths = others.pop("out", None), others.pop("seqlen_k", None)
    *rows, table = args
    if type(table) is tuple and len(table) == 2:
        indptr, table = table
        return Gathered((*rows, table, lengths, indptr), out, {**others, "": "indptr"})
    return Gathered((*args, lengths), out, others)


def of_append_kv(args: tuple[Any, ...], options: dict[str, Any]) -> Gathered | None:
    """k, v, k_pages, v_pages, block_table come by position, seqlen_k, q, rotary by name. None with `seqs` or `validate`."""
    if (
        len(args) != 5
        or options.get("seqs") is not None
        or options.get("validate", False) is not False
    ):
        return None
    others = {**options}
    out, lengths = others.pop("out", None), others.pop("seqlen_k", None)
    q, rotary = others.pop("q", None), others.pop("rotary", None)
    *rows, table = args
    if q is not None:
        rows.append(q)
    given = f"q {q is not None}, rotary {rotary is not None}"
    more: list[Any] = []
    if type(table) is tuple and len(table) == 2:
        *more, table = table
        given += ", indptr"
    if rotary is None:
        return Gathered((*rows, table, lengths, *more), out, {**others, "": given})
    if type(rotary) is not tuple or len(rotary) != 2:
        return None
    return Gathered((*rows, table, *rotary, lengths, *more), out, {**others, "": given})
