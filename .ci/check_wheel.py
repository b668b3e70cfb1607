"""Fails unless a wheel is small, holds the package, all kernel sources and nothing else, and has links for an index page."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

LIMIT = 1_000_000
ROOT = Path(__file__).resolve().parents[1]
# Folder in the repository -> folder in the wheel.
PLACES = {"rawattn": "rawattn", "kernels_cu": "rawattn/kernels_cu"}
FILES = {"examples/embed.py": "rawattn/_examples/embed.py"}
URLS = ("Homepage", "Source", "Issues", "Changelog")


def main(path: Path) -> str | None:
    """Returns None, or a message that says what is wrong with the wheel."""
    expected = set(FILES.values())
    for folder, place in PLACES.items():
        files = (x.relative_to(ROOT / folder) for x in (ROOT / folder).rglob("*") if x.is_file())
        expected |= {f"{place}/{x.as_posix()}" for x in files if "__pycache__" not in x.parts}
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (about,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = wheel.read(about).decode()
    if names != expected:
        missing, surplus = sorted(expected - names), sorted(names - expected)
        return f"{path.name}: missing {missing}, not expected {surplus}"
    if (size := path.stat().st_size) >= LIMIT:
        return f"{path.name}: {size} bytes, expected less than {LIMIT}"
    if absent := [name for name in URLS if f"\nProject-URL: {name}, https://" not in metadata]:
        return f"{path.name}: no project URL named {', '.join(absent)}"
    if relative := re.findall(
        r"\]\((?!https?://|#)[^)]*\)|^\[[^\]]+\]: (?!https?://).*", metadata, re.M
    ):
        return f"{path.name}: links that lead nowhere on an index page: {relative}"
    print(f"{path.name}: {size} bytes, {len(names)} files")
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
