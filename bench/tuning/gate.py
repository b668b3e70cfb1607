"""Checks on the compiled code of Hopper's forward: no wgmma is serialised, and a tile's exponentials come in one stretch."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path


def disassembler() -> str | None:
    """Return the path of nvdisasm, from NVIDIA's wheel or a toolkit; None if there is none."""
    try:
        import nvidia
    except ImportError:
        return shutil.which("nvdisasm")
    found = [path for root in nvidia.__path__ for path in Path(root).glob("*/bin/nvdisasm")]
    return str(found[0]) if found else shutil.which("nvdisasm")


def serialised(log: str) -> list[str]:
    """Return the C75xx warnings of ptxas: it waits for every wgmma, ignores setmaxnreg, or adds waits of its own."""
    return sorted(set(re.findall(r"C75\d\d", log)))


def schedule_fault(image: bytes, tile_k: int, tool: str, early: int = 4) -> str:
    """Say how the schedule of a cubin differs from the one that the source describes; empty if it does not.

    early: how many exponentials the compiler may move ahead of the wait for P V.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(image)
        sass = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True)
    # Count the exponentials between two successive waits for wgmma. A thread computes tile_k / 2 of them for a tile.
    stretches, count = [], 0
    for line in sass.stdout.splitlines():
        if "WARPGROUP.DEPBAR" in line:
            stretches.append(count)
            count = 0
        count += "MUFU.EX2" in line
    # The four waits are for the first tile's scores, a further tile's scores, that tile's P V, and the last P V. The
    # exponentials of a tile lie between the third and the fourth wait, among the conversions that had to wait for P V.
    if len(stretches) != 4:
        return f"{len(stretches)} waits for products instead of 4"
    if stretches[3] < tile_k // 2 - early:
        return f"{stretches[3]} exponentials in one stretch instead of {tile_k // 2}"
    if any(re.search(r"\b(LDL|STL)\b", part) for part in _with_products(sass.stdout)):
        return "registers live in local memory"
    return ""


def _with_products(sass: str) -> list[str]:
    """Return the sections of the code that issue wgmma.

    The others belong to producer warps, which only load. These may spill: they do so once a query tile.
    """
    return [part for part in re.split(r"USETMAXREG", sass) if "HGMMA" in part]
