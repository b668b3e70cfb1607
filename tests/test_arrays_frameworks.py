"""The framework of an array, and the framework of the result. Detecting a framework imports none."""

from __future__ import annotations

import subprocess
import sys
import types

import numpy as np
import pytest

from rawattn._interop.arrays import export_array, framework_of, import_array
from tests import exhaustive
from tests.host_arrays import Elsewhere


def test_imports_no_framework() -> None:
    code = (
        "import sys, numpy as np\n"
        "from rawattn._interop.arrays import import_array, framework_of, export_array\n"
        "array = import_array('q', np.zeros(3)).array\n"
        "export_array(array, framework_of(array), None)\n"
        "print(sorted({'cupy', 'torch', 'jax', 'tensorflow'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def test_framework_of_numpy_and_others() -> None:
    class Subclass(np.ndarray):
        pass

    assert framework_of(np.zeros(3)) == "numpy"
    assert framework_of(np.zeros(3).view(Subclass)) == "numpy"
    assert framework_of(np.ma.zeros(3)) == "numpy"
    assert framework_of([1]) == "builtins"


@pytest.mark.frameworks
def test_framework_of_torch() -> None:
    torch = pytest.importorskip("torch")

    class Subclass(torch.Tensor):
        pass

    assert framework_of(torch.zeros(3)) == "torch"
    assert framework_of(torch.nn.Parameter(torch.zeros(3))) == "torch"
    assert framework_of(torch.zeros(3).as_subclass(Subclass)) == "torch"


@pytest.mark.frameworks
def test_framework_of_jax() -> None:
    jax = pytest.importorskip("jax")
    assert framework_of(jax.numpy.zeros(3)) == "jax"


@pytest.mark.frameworks
@pytest.mark.parametrize(
    "stop",
    exhaustive.thin(["sys.meta_path.insert(0, Unwritable())", "sys.modules['cupy'] = None"], 2),
)
def test_tensors_of_torch_on_the_cpu_need_no_cupy(stop: str) -> None:
    """Tensors on the CPU need no CuPy, neither an absent one nor one that fails to import."""
    pytest.importorskip("torch")
    code = (
        "import sys, warnings\n"
        "class Unwritable:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'cupy':\n"
        "            raise OSError('read-only file system')\n"
        f"{stop}\n"
        "warnings.simplefilter('ignore', RuntimeWarning)\n"
        "import torch, rawattn, rawattn.torch\n"
        "q = torch.randn(1, 5, 2, 8)\n"
        "out, backward = rawattn.attention_vjp(q, q, q, causal=True)\n"
        "assert type(out) is type(backward(out).dq) is torch.Tensor\n"
        "assert torch.equal(rawattn.plan(rawattn.attention, q, q, q, causal=True)(q, q, q), out)\n"
        "x = q.clone().requires_grad_()\n"
        "rawattn.torch.attention(x, q, q).sum().backward()\n"
        "assert x.grad.shape == q.shape\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("exporter", ["newframe", "newframe.core", "newframe.utils.dlpack"])
def test_a_framework_nobody_has_heard_of(monkeypatch: pytest.MonkeyPatch, exporter: str) -> None:
    """from_dlpack of an unknown framework is found in the type's module, in a parent module, or in a dlpack submodule."""
    names = ["newframe", "newframe.core", "newframe.utils", "newframe.utils.dlpack"]
    modules = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    modules["newframe"].utils = modules["newframe.utils"]  # type: ignore[attr-defined]
    modules["newframe.utils"].dlpack = modules["newframe.utils.dlpack"]  # type: ignore[attr-defined]
    array_type = type("Array", (Elsewhere,), {"__module__": "newframe.core"})
    modules[exporter].from_dlpack = lambda x: array_type(np.from_dlpack(x))  # type: ignore[attr-defined]

    given = array_type(np.arange(3.0))
    view = import_array("q", given)
    assert view.framework == ("newframe.core" if exporter == "newframe.core" else "newframe")
    result = export_array(view.array, view.framework, None)
    assert type(result) is array_type
    assert result.array.ctypes.data == given.array.ctypes.data


def test_no_from_dlpack_gives_numpy() -> None:
    view = import_array("q", Elsewhere(np.arange(3.0)))
    assert export_array(view.array, view.framework, None) is view.array
