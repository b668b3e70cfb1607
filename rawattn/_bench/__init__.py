"""The implementation of `rawattn bench`: suites, contenders, counters, timing, reports.

To time your own kernels under the same conditions, use `rawattn._bench.timing.compare`.
"""
