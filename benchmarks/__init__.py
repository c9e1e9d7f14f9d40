"""Benchmarks of pycollect: ours, the peer and the limit, interleaved in one run."""
