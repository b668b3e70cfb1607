"""Python functions as custom calls of XLA programs: handlers of its typed foreign function interface, in ctypes alone.

XLA calls a handler with the addresses of its own buffers, and on a GPU with the stream of its kernels. The structs are those
of `xla/ffi/api/c_api.h`, which jaxlib ships; a test compares them with it. XLA only appends fields to them, and accepts the
structs of older versions.

No framework is imported here.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
import traceback
from collections.abc import Callable, Iterator
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

_MAJOR, _MINOR = 0, 3  # of the interface that is declared here
_OLDEST = 1  # the minor version of jaxlib 0.8.0
_METADATA = 1  # type of the extension by which XLA queries a handler's metadata
_ALIGNMENT = 16  # bytes, the largest that XLA's allocator accepts

# XLA's error codes by Python exception, first match. XLA names the code in the exception that the user sees.
_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (MemoryError, 8),  # RESOURCE_EXHAUSTED
    (NotImplementedError, 12),  # UNIMPLEMENTED
    (ValueError, 3),  # INVALID_ARGUMENT
    (TypeError, 3),
    (KeyboardInterrupt, 1),  # CANCELLED
    (BaseException, 13),  # INTERNAL
)


def _plain(name: str, *fields: tuple[str, Any]) -> Any:
    return type(name, (Structure,), {"_fields_": list(fields)})


def _struct(name: str, *fields: tuple[str, Any]) -> Any:
    """A struct that begins as most structs of the interface do: with its own size and a pointer to a chain of extensions."""
    return _plain(name, ("struct_size", c_size_t), ("extension_start", c_void_p), *fields)


Extension = _plain("Extension", ("struct_size", c_size_t), ("type", c_int), ("next", c_void_p))
ApiVersion = _struct("ApiVersion", ("major_version", c_int), ("minor_version", c_int))
Metadata = _plain(
    "Metadata", ("struct_size", c_size_t), ("api_version", ApiVersion), ("traits", c_uint32)
)
MetadataExtension = _plain(
    "MetadataExtension", ("extension_base", Extension), ("metadata", POINTER(Metadata))
)
Api = _struct(
    "Api",
    ("api_version", ApiVersion),
    ("internal_api", c_void_p),
    *(
        (name, c_void_p)
        for name in (
            "Error_Create",
            "Error_GetDetails",
            "Error_Destroy",
            "Handler_Register",
            "Stream_Get",
            "Type_Register",
            "InvokeContext_Get",
            "State_Set",
            "State_Get",
            "DeviceMemory_Allocate",
            "DeviceMemory_Free",
            "ThreadPool_Schedule",
            "ThreadPool_NumThreads",
            "Future_Create",
            "Future_SetAvailable",
            "Future_SetError",
            "RunId_Get",
            "DeviceOrdinal_Get",
        )
    ),
)
Buffer = _struct(
    "Buffer",
    ("dtype", c_int),
    ("data", c_void_p),
    ("rank", c_int64),
    ("dims", c_void_p),
)
ByteSpan = _plain("ByteSpan", ("ptr", c_void_p), ("len", c_size_t))
Args = _struct("Args", ("size", c_int64), ("types", c_void_p), ("args", c_void_p))
Rets = _struct("Rets", ("size", c_int64), ("types", c_void_p), ("rets", c_void_p))
Attrs = _struct(
    "Attrs", ("size", c_int64), ("types", c_void_p), ("names", c_void_p), ("attrs", c_void_p)
)
CallFrame = _struct(
    "CallFrame",
    ("api", c_void_p),
    ("ctx", c_void_p),
    ("stage", c_int),
    ("args", Args),
    ("rets", Rets),
    ("attrs", Attrs),
)
ErrorCreate = _struct("ErrorCreate", ("message", ctypes.c_char_p), ("errc", c_int))
# Before version 0.4 this function is XLA_FFI_Error_GetMessage, whose struct ends with the message.
ErrorGetDetails = _struct(
    "ErrorGetDetails", ("error", c_void_p), ("message", ctypes.c_char_p), ("errc", c_int)
)
ErrorDestroy = _struct("ErrorDestroy", ("error", c_void_p))
StreamGet = _struct("StreamGet", ("ctx", c_void_p), ("stream", c_void_p))
DeviceOrdinalGet = _struct("DeviceOrdinalGet", ("ctx", c_void_p), ("device_ordinal", c_int32))
MemoryAllocate = _struct(
    "MemoryAllocate",
    ("ctx", c_void_p),
    ("size", c_size_t),
    ("alignment", c_size_t),
    ("data", c_void_p),
)
MemoryFree = _struct("MemoryFree", ("ctx", c_void_p), ("size", c_size_t), ("data", c_void_p))

# NumPy's names of the dtypes that calls use, by XLA's codes.
DTYPES = {
    1: "bool",
    4: "int32",
    5: "int64",
    10: "float16",
    11: "float32",
    12: "float64",
    16: "bfloat16",
}

_HANDLER = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_DATA_AT = Buffer.data.offset

# All memory as an array of 8-byte words and as an array of bytes, by which XLA's structs are read at their addresses. Making a
# ctypes struct of each takes five times as long.
_WORDS = (c_uint64 * (sys.maxsize // 16)).from_address(0)
_BYTES: Any = (c_char * (sys.maxsize // 2)).from_address(0)
# Offsets in a call frame, in words, of the fields that are read.
_EXTENSION, _API, _CTX = (
    getattr(CallFrame, name).offset // 8 for name in ("extension_start", "api", "ctx")
)
_ARGS, _RETS = (
    (getattr(CallFrame, of).offset + kind.size.offset) // 8
    for of, kind in (("args", Args), ("rets", Rets))
)
_ITEMS = (Args.args.offset - Args.size.offset) // 8  # from field `size` of Args or Rets
_ATTRS = (CallFrame.attrs.offset + Attrs.attrs.offset) // 8


class Call:
    """One call of a handler. It is valid, and so is its memory, until the handler returns.

    text: the value of the call's only attribute, a string.
    inputs, outputs: addresses of the buffers, which are in C order; the address of one without elements may be 0.
    """

    __slots__ = ("_allocated", "_ctx", "_frame", "_xla", "inputs", "outputs", "text")

    def __init__(self, frame: int, xla: _Xla) -> None:
        """frame: its index in `_WORDS`."""
        span = _WORDS[_WORDS[frame + _ATTRS] // 8] // 8
        at = _WORDS[span]
        self.text = _BYTES[at : at + _WORDS[span + 1]]
        self.inputs = _addresses(frame + _ARGS)
        self.outputs = _addresses(frame + _RETS)
        self._frame = frame
        self._ctx = _WORDS[frame + _CTX]
        self._xla = xla
        self._allocated: list[tuple[int, int]] | None = None

    def forms(self) -> list[tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of the buffers, those of inputs first."""
        return [*_forms(self._frame + _ARGS), *_forms(self._frame + _RETS)]

    def stream(self) -> int:
        """Handle of the CUDA stream that the program runs on."""
        return int(self._xla.stream.get(self._ctx) or 0)

    def device(self) -> int:
        """CUDA ordinal of the GPU that the program runs on."""
        return int(self._xla.device.get(self._ctx))

    def allocate(self, nbytes: int) -> int:
        """The address of device memory from XLA, for work that this call puts on its stream and nothing later."""
        if not nbytes:
            return 0
        request = MemoryAllocate(
            ctypes.sizeof(MemoryAllocate), None, self._ctx, nbytes, _ALIGNMENT, None
        )
        error = self._xla.memory_allocate(byref(request))
        if error:
            raise MemoryError(f"{nbytes} bytes of XLA's device memory: {self._xla.take(error)}")
        if self._allocated is None:
            self._allocated = []
        self._allocated.append((request.data, nbytes))
        return int(request.data)

    @property
    def has_allocations(self) -> bool:
        return self._allocated is not None

    def free(self) -> None:
        """Gives back all memory from `allocate`. XLA reuses it in the order of the stream."""
        while self._allocated:
            address, nbytes = self._allocated.pop()
            request = MemoryFree(ctypes.sizeof(MemoryFree), None, self._ctx, nbytes, address)
            self._xla.check(self._xla.memory_free(byref(request)))


def handler(run: Callable[[Call], None]) -> Any:
    """A C function for `jax.ffi.pycapsule` that calls `run` for each custom call.

    An exception of `run` becomes an error of the program with its text. The handler does not allow XLA to record the call into
    a CUDA graph and replay it, so `run` runs at every call. The caller must keep the function for the life of the process.
    """

    def handle(address: int) -> int | None:
        frame = address // 8
        api, extension = _WORDS[frame + _API], _WORDS[frame + _EXTENSION]
        if not api:  # jaxlib 0.8.0 asks for metadata without its interface
            _describe(extension, _OLDEST)
            return None
        xla = _xla(api)
        try:
            if extension and _asks_for_metadata(extension):
                _check_version(xla)
                _describe(extension, xla.version[1])
                return None
            call = Call(frame, xla)
            try:
                run(call)
            finally:
                if call.has_allocations:
                    call.free()
        except BaseException as error:  # ctypes would swallow one that leaves a C callback
            return xla.error(error)
        return None

    return _HANDLER(handle)


def is_traced(obj: object) -> bool:
    """Whether `obj` is a JAX tracer, an array without values in a function under transformation. Does not import JAX."""
    jax = sys.modules.get("jax")
    tracer = getattr(getattr(jax, "core", None), "Tracer", None)
    return tracer is not None and isinstance(obj, tracer)


class _Xla:
    """The functions that XLA offers to handlers."""

    def __init__(self, address: int) -> None:
        api = Api.from_address(address)
        self.version = api.api_version.major_version, api.api_version.minor_version
        self.complete = api.struct_size >= ctypes.sizeof(Api)
        # `_with_gil` functions are called with the GIL held, since they return at once. Allocations release it: one may wait
        # for another thread to free memory.
        self._error_create = _with_gil(api.Error_Create)
        self._error_details = _with_gil(api.Error_GetDetails)
        self._error_destroy = _with_gil(api.Error_Destroy)
        self.stream = _Query(self, api.Stream_Get, StreamGet, "stream")
        self.device = _Query(self, api.DeviceOrdinal_Get, DeviceOrdinalGet, "device_ordinal")
        self.memory_allocate = _HANDLER(api.DeviceMemory_Allocate)
        self.memory_free = _HANDLER(api.DeviceMemory_Free)

    def error(self, error: BaseException) -> int:
        """The address of a new XLA error with the text of `error`."""
        code = next(code for kind, code in _CODES if isinstance(error, kind))
        lines = traceback.format_exception_only(type(error), error)
        message = "rawattn: " + "".join(lines).strip().replace("\0", "")
        text = message.encode(errors="backslashreplace")  # it may have surrogates, as of a path
        request = ErrorCreate(ctypes.sizeof(ErrorCreate), None, text, code)
        created: int = self._error_create(byref(request))
        return created

    def check(self, error: int | None) -> None:
        if error:
            raise RuntimeError(self.take(error))

    def take(self, error: int) -> str:
        """The message of XLA's `error`, which is then destroyed."""
        request = ErrorGetDetails(ctypes.sizeof(ErrorGetDetails), None, error, None, 0)
        self._error_details(byref(request))
        message: bytes = request.message
        self._error_destroy(byref(ErrorDestroy(ctypes.sizeof(ErrorDestroy), None, error)))
        return message.decode(errors="replace")


class _Query:
    """A query that XLA answers in every call. Its argument structs are pooled; each is used by one thread at a time."""

    def __init__(self, xla: _Xla, address: int, struct: Any, answer: str) -> None:
        self._xla, self._call, self._struct = xla, _with_gil(address), struct
        self._answer = operator.attrgetter(answer)
        self._free: list[tuple[Any, int]] = []

    def get(self, ctx: int) -> Any:
        try:
            found = self._free.pop()
        except IndexError:
            made = self._struct(ctypes.sizeof(self._struct))
            found = made, ctypes.addressof(made)
        request, address = found
        request.ctx = ctx
        error = self._call(address)
        if error:
            self._xla.check(error)
        answer = self._answer(request)
        self._free.append(found)
        return answer


@functools.cache
def _xla(address: int) -> _Xla:
    return _Xla(address)


_WITH_GIL = ctypes.PYFUNCTYPE(c_void_p, c_void_p)


def _with_gil(address: int) -> Any:
    return _WITH_GIL(address)


def _asks_for_metadata(extension: int) -> bool:
    return bool(Extension.from_address(extension).type == _METADATA)


def _check_version(xla: _Xla) -> None:
    if xla.version[0] != _MAJOR or not xla.complete:
        raise RuntimeError(
            f"rawattn.jax is written for version {_MAJOR}.{_MINOR} of XLA's foreign function interface, and jaxlib has "
            f"{xla.version[0]}.{xla.version[1]}; install another jaxlib or rawattn"
        )


def _describe(extension: int, minor_version: int) -> None:
    """Fills in the handler's metadata. minor_version: that of XLA's interface."""
    metadata = MetadataExtension.from_address(extension).metadata.contents
    metadata.api_version.major_version = _MAJOR
    metadata.api_version.minor_version = min(_MINOR, minor_version)
    metadata.traits = 0


def _addresses(buffers: int) -> list[int]:
    """The data addresses of the buffers of an Args or Rets. buffers: the index in `_WORDS` of its field `size`."""
    items = _WORDS[buffers + _ITEMS] // 8
    return [_WORDS[(at + _DATA_AT) // 8] for at in _WORDS[items : items + _WORDS[buffers]]]


def _forms(buffers: int) -> Iterator[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of the same buffers."""
    items = _WORDS[buffers + _ITEMS] // 8
    for at in _WORDS[items : items + _WORDS[buffers]]:
        buffer = Buffer.from_address(at)
        dims = buffer.dims // 8 if buffer.rank else 0
        shape = tuple(_WORDS[dims : dims + buffer.rank])
        yield shape, DTYPES.get(buffer.dtype, f"XLA's type {buffer.dtype}")
