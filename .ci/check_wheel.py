"""Fails unless a wheel is small and holds the package, all device text, and nothing else."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

LIMIT = 1_000_000
ROOT = Path(__file__).resolve().parents[1]
# Folder in the repository -> folder in the wheel.
PLACES = {"rawattn": "rawattn", "kernels_cu": "rawattn/kernels_cu"}
FILES = {"examples/embed.py": "rawattn/_examples/embed.py"}


def main(path: Path) -> str | None:
    """None, or what is wrong."""
    expected = set(FILES.values())
    for folder, place in PLACES.items():
        files = (x.relative_to(ROOT / folder) for x in (ROOT / folder).rglob("*") if x.is_file())
        expected |= {f"{place}/{x.as_posix()}" for x in files if "__pycache__" not in x.parts}
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    if names != expected:
        missing, surplus = sorted(expected - names), sorted(names - expected)
        return f"{path.name}: missing {missing}, not expected {surplus}"
    if (size := path.stat().st_size) >= LIMIT:
        return f"{path.name}: {size} bytes, expected less than {LIMIT}"
    print(f"{path.name}: {size} bytes, {len(names)} files")
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
