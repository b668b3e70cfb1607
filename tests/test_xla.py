"""Handlers of XLA's foreign function interface, against the header that jaxlib ships and a fake XLA of this module."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rawattn._interop import xla

pytestmark = pytest.mark.frameworks


def test_a_tracer_is_told_without_jax() -> None:
    code = (
        "import sys; from rawattn._interop import xla; assert not xla.is_traced(1); "
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    jax = pytest.importorskip("jax")
    seen: list[bool] = []
    jax.jit(lambda x: seen.append(xla.is_traced(x)))(1.0)
    assert seen == [True]
    assert not xla.is_traced(jax.numpy.ones(3)) and not xla.is_traced(np.ones(3))


STRUCTS = {
    "XLA_FFI_InternalExtension": xla.Extension,
    "XLA_FFI_Api_Version": xla.ApiVersion,
    "XLA_FFI_Metadata": xla.Metadata,
    "XLA_FFI_Metadata_Extension": xla.MetadataExtension,
    "XLA_FFI_Api": xla.Api,
    "XLA_FFI_Buffer": xla.Buffer,
    "XLA_FFI_ByteSpan": xla.ByteSpan,
    "XLA_FFI_Args": xla.Args,
    "XLA_FFI_Rets": xla.Rets,
    "XLA_FFI_Attrs": xla.Attrs,
    "XLA_FFI_CallFrame": xla.CallFrame,
    "XLA_FFI_Error_Create_Args": xla.ErrorCreate,
    "XLA_FFI_Error_GetDetails_Args": xla.ErrorGetDetails,
    "XLA_FFI_Error_Destroy_Args": xla.ErrorDestroy,
    "XLA_FFI_Stream_Get_Args": xla.StreamGet,
    "XLA_FFI_DeviceOrdinal_Get_Args": xla.DeviceOrdinalGet,
    "XLA_FFI_DeviceMemory_Allocate_Args": xla.MemoryAllocate,
    "XLA_FFI_DeviceMemory_Free_Args": xla.MemoryFree,
}

# Names since version 0.4 of the interface, and their names before it.
BEFORE_0_4 = {
    "XLA_FFI_InternalExtension": "XLA_FFI_Extension_Base",
    "XLA_FFI_Error_GetDetails": "XLA_FFI_Error_GetMessage",
    "XLA_FFI_InvokeContext_Get": "XLA_FFI_ExecutionContext_Get",
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to read XLA's header with")
def test_structs_are_those_of_the_header(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    directory = Path(jax.ffi.include_dir())
    header = (directory / "xla/ffi/api/c_api.h").read_text("utf-8")
    fields = []
    lines = ""
    for struct, ours in STRUCTS.items():
        for name, _ in [*ours._fields_]:
            their = f"XLA_FFI_{name}" if ours is xla.Api and name[0].isupper() else name
            where = struct
            for new, old in BEFORE_0_4.items():
                if not re.search(rf"\b{new}\b", header):
                    where, their = where.replace(new, old), their.replace(new, old)
            if name == "errc" and where == "XLA_FFI_Error_GetMessage_Args":
                continue
            fields.append((struct, name, getattr(ours, name).offset, getattr(ours, name).size))
            lines += f'printf("%zu %zu\\n", offsetof({where}, {their}), sizeof((({where}*)0)->{their}));\n'
    assert len(fields) > 80
    source = tmp_path / "offsets.cc"
    source.write_text(
        f'#include <cstdio>\n#include "xla/ffi/api/c_api.h"\nint main() {{ {lines} }}\n'
    )
    program = tmp_path / "offsets"
    subprocess.run(["g++", "-w", f"-I{directory}", source, "-o", program], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    theirs = [tuple(map(int, line.split())) for line in printed.splitlines()]
    assert theirs == [(offset, size) for _, _, offset, size in fields]


def test_dtypes_are_those_of_the_header() -> None:
    jax = pytest.importorskip("jax")
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text("utf-8")
    codes = {name: int(n) for name, n in re.findall(r"XLA_FFI_DataType_(\w+) = (\d+)", header)}
    theirs = {"bool": "PRED", "bfloat16": "BF16"}
    for code, name in xla.DTYPES.items():
        short = theirs.get(name) or name.replace("int", "S").replace("float", "F")
        assert codes[short] == code, name


# Handlers identify an XLA by its address, so no fake may be freed and its address reused.
_ALIVE: list[Any] = []


class Xla:
    """Functions that a handler calls. Each is given the struct of its arguments."""

    def __init__(self, **functions: tuple[Any, Any]) -> None:
        _ALIVE.append(self)
        self.api = xla.Api(struct_size=ctypes.sizeof(xla.Api))
        self.api.api_version.minor_version = 9
        for name, _ in [*xla.Api._fields_]:
            if name[0].isupper():
                self._put(name, *functions.get(name, (xla.ErrorDestroy, _unexpected)))

    def _put(self, name: str, struct: Any, body: Any) -> None:
        function = xla._HANDLER(lambda at: body(struct.from_address(at)))
        _ALIVE.append(function)
        setattr(self.api, name, ctypes.cast(function, ctypes.c_void_p))


def _unexpected(arguments: Any) -> None:
    raise AssertionError("called")


def test_another_version_of_the_interface_is_refused() -> None:
    """A handler refuses another version of the interface when XLA asks for its metadata, before any call."""
    said: list[bytes] = []

    def create(asked: Any) -> int:
        said.append(asked.message)
        return 1

    theirs = Xla(Error_Create=(xla.ErrorCreate, create))
    metadata = xla.Metadata()
    extension = xla.MetadataExtension(metadata=ctypes.pointer(metadata))
    extension.extension_base.type = 1
    frame = xla.CallFrame(extension_start=ctypes.addressof(extension))
    frame.api = ctypes.addressof(theirs.api)
    handler = xla.handler(lambda call: None)
    assert handler(ctypes.addressof(frame)) is None
    assert (metadata.api_version.major_version, metadata.api_version.minor_version) == (0, 3)
    assert metadata.traits == 0, "XLA must not record a call into a graph"

    older = Xla(Error_Create=(xla.ErrorCreate, create))
    older.api.struct_size -= 8
    frame.api = ctypes.addressof(older.api)
    assert handler(ctypes.addressof(frame)) == 1
    assert b"install another jaxlib" in said[0]

    frame.api, metadata.traits = None, 1  # as of jaxlib 0.8.0
    assert handler(ctypes.addressof(frame)) is None
    assert (metadata.api_version.major_version, metadata.api_version.minor_version) == (0, 1)
    assert metadata.traits == 0


def test_what_a_call_is_told() -> None:
    def stream(asked: Any) -> None:
        assert asked.ctx == 5 and asked.struct_size == 32
        asked.stream = 77

    def device(asked: Any) -> None:
        assert asked.ctx == 5 and asked.struct_size >= 28
        asked.device_ordinal = 3

    theirs = Xla(
        Stream_Get=(xla.StreamGet, stream), DeviceOrdinal_Get=(xla.DeviceOrdinalGet, device)
    )
    frame, alive = _frame(theirs, b"text")
    dims = (ctypes.c_int64 * 2)(3, 5)
    at = ctypes.addressof(dims)
    buffers = [
        xla.Buffer(data=4096, dtype=4, rank=2, dims=at),
        xla.Buffer(data=0, dtype=16, rank=0),
        xla.Buffer(data=512, dtype=25, rank=1, dims=at),
    ]
    pointers = (ctypes.c_void_p * 3)(*map(ctypes.addressof, buffers))
    frame.args.size, frame.args.args = 2, ctypes.addressof(pointers)
    frame.rets.size, frame.rets.rets = 1, ctypes.addressof(pointers) + 16
    seen: list[Any] = []

    def run(call: xla.Call) -> None:
        assert call.forms() == [((3, 5), "int32"), ((), "bfloat16"), ((3,), "XLA's type 25")]
        seen.append((call.text, call.inputs, call.outputs, call.stream(), call.device()))

    assert xla.handler(run)(ctypes.addressof(frame)) is None and alive
    assert seen == [(b"text", [4096, 0], [512], 77, 3)]


def _frame(theirs: Xla, text: bytes) -> tuple[Any, Any]:
    """The frame of a call without buffers, and the objects that must outlive it."""
    string = ctypes.create_string_buffer(text)
    span = xla.ByteSpan(ctypes.addressof(string), len(text))
    attribute = ctypes.c_void_p(ctypes.addressof(span))
    frame = xla.CallFrame(api=ctypes.addressof(theirs.api), ctx=5)
    frame.attrs.size, frame.attrs.attrs = 1, ctypes.addressof(attribute)
    return frame, (string, span, attribute, theirs)


def test_memory_of_xla_is_given_back() -> None:
    """All memory that a call took is freed, whether the call failed or not. If XLA has none, the error gives XLA's reason."""
    held: dict[int, int] = {}
    said: list[bytes] = []

    def allocate(asked: Any) -> int | None:
        if asked.size > 1000:
            return 7
        assert asked.ctx == 5 and asked.alignment == 16
        asked.data = 4096 * (len(held) + 1)
        held[asked.data] = asked.size
        return None

    def free(asked: Any) -> None:
        assert held.pop(asked.data) == asked.size

    def message(asked: Any) -> None:
        assert asked.error == 7
        asked.message = b"all of it is in use"

    def create(asked: Any) -> int:
        said.append(asked.message)
        return 9

    theirs = Xla(
        Error_Create=(xla.ErrorCreate, create),
        Error_GetDetails=(xla.ErrorGetDetails, message),
        Error_Destroy=(xla.ErrorDestroy, lambda asked: None),
        DeviceMemory_Allocate=(xla.MemoryAllocate, allocate),
        DeviceMemory_Free=(xla.MemoryFree, free),
    )
    frame, alive = _frame(theirs, b"record")
    wanted = [300, 0, 700]

    def run(call: xla.Call) -> None:
        addresses = [call.allocate(n) for n in wanted]
        assert addresses == [4096, 0, 8192] and list(held.values()) == [300, 700]

    handler = xla.handler(run)
    assert handler(ctypes.addressof(frame)) is None and alive
    assert not held
    wanted[2] = 5000
    assert handler(ctypes.addressof(frame)) == 9
    assert not held
    assert said == [b"rawattn: MemoryError: 5000 bytes of XLA's device memory: all of it is in use"]


def test_an_error_may_have_any_text() -> None:
    """A path that is no UTF-8 has surrogates in Python. An error that could not be told would count as none."""
    said: list[bytes] = []

    def create(asked: Any) -> int:
        said.append(asked.message)
        return 1

    def run(call: xla.Call) -> None:
        raise ValueError("/tmp/\udce9")

    frame, alive = _frame(Xla(Error_Create=(xla.ErrorCreate, create)), b"text")
    assert xla.handler(run)(ctypes.addressof(frame)) == 1 and alive
    assert said == [rb"rawattn: ValueError: /tmp/\udce9"]
