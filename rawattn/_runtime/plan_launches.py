"""How a plan launches on its own arrays: kernel after kernel, or all kernels as one CUDA graph.

The host launches a graph in less than half of the time that a single kernel takes it. But a graph does not begin while the
kernel before it in the stream ends, as an early launch does (`Step.early`). So only those plans have a graph whose kernels
take about as long as the host takes to launch them (docs/notes/host-time.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rawattn._call.dtypes import DTYPES
from rawattn._call.problem import Problem
from rawattn._interop import streams
from rawattn._runtime import driver
from rawattn._runtime.launches import BoundLaunch
from rawattn._runtime.verbs import Verb

LaunchAll = Callable[[int], None]  # takes the stream

# What a short plan reads and writes at most, in bytes, and how many operations its products have at most: some 10
# microseconds of an H200.
_SHORT_BYTES = 16 << 20
_SHORT_OPERATIONS = 5e9


def is_short(verb: Verb, problem: Problem) -> bool:
    """Whether the kernels of such a call take about as long as their launch. Keys in pages count by the pages' room."""
    sequences = 1 if problem.packed else problem.batch
    rows_q = sequences * problem.rows_q
    rows_k = (sequences if problem.pages is None else problem.batch) * problem.rows_k
    keys = problem.max_seqlen_k
    if problem.partials is not None:
        rows_q *= problem.partials.parts
    if verb.written:  # rows are copied into pages
        rows_k, keys = rows_q, 0
    columns = problem.headdim + problem.headdim_v
    elements = (rows_q * problem.nheads_q + rows_k * problem.nheads_kv) * columns
    operations = 2 * rows_q * keys * problem.nheads_q * columns
    if (
        "dq" in verb.outputs
    ):  # five products in place of two, and gradients beside what the forward reads and writes
        elements, operations = 2 * elements, 5 * operations // 2
    nbytes = elements * DTYPES[problem.dtype].itemsize
    return nbytes <= _SHORT_BYTES and operations <= _SHORT_OPERATIONS


def launcher(launches: Sequence[BoundLaunch], as_graph: bool) -> LaunchAll:
    """A function that makes launches whose parameters are written. Their device must be the current one.

    as_graph: they are captured now, and launched as a graph. Where a stream is being captured, kernels are launched one by one.
    """
    enqueues = [(each.enqueue, each.blocks, each.arguments) for each in launches]

    def one_by_one(stream: int) -> None:
        for enqueue, blocks, arguments in enqueues:
            enqueue(blocks, stream, arguments)

    return _graph_of(one_by_one) if as_graph and enqueues else one_by_one


def _graph_of(one_by_one: LaunchAll) -> LaunchAll:
    import cupy

    runtime = cupy.cuda.runtime
    with driver.outside_capture():
        own_stream = cupy.cuda.Stream(non_blocking=True)
        own_stream.begin_capture(runtime.streamCaptureModeRelaxed)
        try:
            one_by_one(own_stream.ptr)
        finally:
            graph = own_stream.end_capture()
        graph.upload(own_stream)
        own_stream.synchronize()
    enqueue, handle, is_capturing = runtime.graphLaunch, graph.graphExec, streams.is_capturing

    def launch(stream: int, graph: object = graph) -> None:  # which owns the handle
        # A graph that is launched into a capture makes it invalid.
        if stream > 1 and is_capturing(stream):
            one_by_one(stream)
        else:
            enqueue(handle, stream)

    return launch
