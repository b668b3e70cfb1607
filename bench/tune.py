"""Measures candidate tile shapes on this machine and writes the tables that the library chooses from. --help says how."""

from __future__ import annotations

import sys
from pathlib import Path

# The checkout that this file lies in, whatever is installed: its tables are read and written.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.tuning import command

if __name__ == "__main__":
    sys.exit(command.main())
