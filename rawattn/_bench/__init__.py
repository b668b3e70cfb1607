"""What `rawattn bench` measures and how: suites, contenders, counters, timing, reports.

To time kernels of one's own under the same conditions, use `rawattn._bench.timing.compare`.
"""
