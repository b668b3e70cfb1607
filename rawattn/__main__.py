"""`python -m rawattn`: the `rawattn` command."""

from __future__ import annotations

import sys

from rawattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
