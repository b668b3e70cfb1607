"""Measure candidate tile shapes on this GPU and write the tile tables that the library reads. See --help."""

from __future__ import annotations

import sys
from pathlib import Path

# Import from the checkout that contains this file, not from an installed package: its tables are read and written.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.tuning import command

if __name__ == "__main__":
    sys.exit(command.main())
