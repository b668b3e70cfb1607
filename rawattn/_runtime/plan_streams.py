"""The streams on which a plan's calls have been launched. The plan's memory is freed behind the work on all of them."""

from __future__ import annotations

import contextlib
from typing import Any

from rawattn._interop import streams
from rawattn._interop.native import Native

_MOST = 64  # streams that are kept


class PlanStreams:
    """Streams of one device. They are kept from being destroyed: CUDA crashes where a destroyed one is waited for.

    own: that of planning time, in whose order memory is freed. known: by the handle of each stream, what keeps it.
    """

    def __init__(self, native: Native, device: int) -> None:
        self._native, self._device = native, device
        self.own = native.stream(device)
        self._keeper = native.stream_keeper(device)
        self.known: dict[int, Any] = {self.own: self._keeper}

    def add(self, stream: int) -> None:
        """Adds the framework's current stream, on which a call is launched. stream: its handle."""
        if len(self.known) >= _MOST and not streams.is_capturing(self.own):
            oldest = next(iter(self.known))
            self._wait_for(oldest)
            del self.known[oldest]
        self.known[stream] = self._native.stream_keeper(self._device)

    def join(self) -> None:
        """Makes the plan's own stream wait for all others."""
        for stream in self.known:
            self._wait_for(stream)

    def _wait_for(self, stream: int) -> None:
        with contextlib.suppress(Exception):  # a stream of other code that was destroyed
            streams.order(stream, self.own, self._device)
