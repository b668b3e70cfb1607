"""What Hopper's forward must look like after compilation: no products serialised, exponentials in one stretch."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path


def disassembler() -> str | None:
    """nvdisasm, of NVIDIA's wheel or of a toolkit."""
    try:
        import nvidia
    except ImportError:
        return shutil.which("nvdisasm")
    found = [path for root in nvidia.__path__ for path in Path(root).glob("*/bin/nvdisasm")]
    return str(found[0]) if found else shutil.which("nvdisasm")


def serialised(log: str) -> list[str]:
    """ptxas says C75xx where it waits for every product, ignores setmaxnreg or adds waits of its own."""
    return sorted(set(re.findall(r"C75\d\d", log)))


def schedule_fault(image: bytes, tile_k: int, tool: str, early: int = 4) -> str:
    """What is wrong with the schedule of a cubin; nothing when it is the one that the source describes.

    early: exponentials that the compiler may begin before the wait for P V.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(image)
        sass = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True)
    # Exponentials of one row pair in each stretch between two waits for products.
    stretches, count = [], 0
    for line in sass.stdout.splitlines():
        if "WARPGROUP.DEPBAR" in line:
            stretches.append(count)
            count = 0
        count += "MUFU.EX2" in line
    # The waits: first scores; scores of a tile; the tile's P V; the last P V. Between the third and the fourth lie the
    # exponentials of a tile, among the conversions that P V had held up.
    if len(stretches) != 4:
        return f"{len(stretches)} waits for products instead of 4"
    if stretches[3] < tile_k // 2 - early:
        return f"{stretches[3]} exponentials in one stretch instead of {tile_k // 2}"
    if any(re.search(r"\b(LDL|STL)\b", part) for part in _with_products(sass.stdout)):
        return "registers live in local memory"
    return ""


def _with_products(sass: str) -> list[str]:
    """The parts for warps that wait for products. Those that only load may spill: they do so once a query tile."""
    return [part for part in re.split(r"USETMAXREG", sass) if "HGMMA" in part]
