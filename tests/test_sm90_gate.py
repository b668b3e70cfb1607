"""Every Hopper variant the chooser can pick compiles into the schedule its source describes. Needs no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rawattn import _compile
from rawattn._kernels import common_variants, sm90_forward

VARIANTS = [
    source
    for source in common_variants(sm90_forward.ARCH, every=True)
    if source.entry == sm90_forward.ENTRY
]


def nvdisasm() -> str | None:
    try:
        import nvidia
    except ImportError:
        return shutil.which("nvdisasm")
    found = [path for root in nvidia.__path__ for path in Path(root).glob("*/bin/nvdisasm")]
    return str(found[0]) if found else shutil.which("nvdisasm")


@pytest.mark.parametrize("source", VARIANTS, ids=lambda source: source.summary)
def test_no_spills_and_no_serialised_products(source: _compile.Source) -> None:
    cubin = _compile.compile_source(source, sm90_forward.ARCH)
    assert cubin.meta["spills"] == 0
    # ptxas says C75xx where it waits for every product, ignores setmaxnreg or adds waits of its own.
    assert not re.findall(r"C75\d\d", cubin.log)


@pytest.mark.parametrize("source", VARIANTS, ids=lambda source: source.summary)
def test_softmax_runs_under_the_products(source: _compile.Source, tmp_path: Path) -> None:
    """Between the wait for the scores and the wait for P V lie all exponentials of the tile."""
    tool = nvdisasm()
    if tool is None:
        pytest.skip("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
    cubin = _compile.compile_source(source, sm90_forward.ARCH)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(cubin.image)
    sass = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True)
    tile_k = int(re.search(r"kTileK = (\d+)", source.text)[1])  # type: ignore[index]
    # Exponentials of one row pair in each stretch between two waits for products.
    stretches, count = [], 0
    for line in sass.stdout.splitlines():
        if "WARPGROUP.DEPBAR" in line:
            stretches.append(count)
            count = 0
        count += "MUFU.EX2" in line
    # The waits: first scores; scores of a tile; its P V; the last P V.
    assert len(stretches) == 4, "the compiler added waits for products"
    assert stretches[2] >= tile_k // 2
    assert not re.search(r"\b(LDL|STL)\b", sass.stdout), "registers live in local memory"
