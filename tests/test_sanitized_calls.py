"""The calls for compute-sanitizer take every switch of every kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Makes the calls without a GPU (tests/dry_gpu.py) and prints the switches of each kernel that no call turns on. Results are not
# computed, so checks of them fail; such exceptions say nothing here.
_SCRIPT = """
import contextlib, re
from collections import defaultdict
from tests import dry_gpu
dry_gpu.stand_in_for_the_gpu()
dry_gpu.look_away()
from tests import sanitized_calls as calls
more = (
    calls.page_calls, calls.append_calls, calls.gathered_calls, calls.decoded_calls, calls.nan_calls
)
for call in [*(step.run for step in calls.matrix()), *(call for make in more for call in make())]:
    with contextlib.suppress(Exception):
        call()
values = defaultdict(set)
for source in dry_gpu.loaded:
    for name, value in re.findall(r"constexpr bool (k\\w+) = (true|false);", source.text):
        values[source.entry, name].add(value)
assert len(values) > 100
print(*sorted(f"{entry}.{name}" for (entry, name), found in values.items() if found == {"false"}))
"""
# Switches that no call turns on. Pages of 8 bits have no backward. Decoding has no dropout and no derivatives, and Hopper's
# decoding knows no tile inside one page. A line has no kernels of its own for dbias and for dq alone. kNeedsScore is a
# constant of the text of a score function.
_NEVER_ON = {
    "rawattn_backward.kFloat8",
    "rawattn_backward_bias.kFloat8",
    "rawattn_backward_bias.kModLine",
    "rawattn_backward_bias.kNeedsScore",
    "rawattn_backward_dq.kFloat8",
    "rawattn_backward_dq.kModLine",
    "rawattn_backward_finish.kFloat8",
    "rawattn_decode.kDropout",
    "rawattn_decode.kNeedsScore",
    "rawattn_sm90_decode.kDropout",
    "rawattn_sm90_decode.kNeedsScore",
    "rawattn_sm90_decode.kTileInPage",
}


@pytest.mark.exhaustive
def test_every_switch_is_on_in_some_call() -> None:
    pytest.importorskip("cupy")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SCRIPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) == _NEVER_ON
