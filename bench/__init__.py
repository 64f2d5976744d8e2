"""Benchmarks: one module each, run with `hicache bench run NAME`; `hicache.bench.common` is what they share."""
