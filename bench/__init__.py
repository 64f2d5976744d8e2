"""Benchmarks: one module each, run with `hicache bench run NAME`; `hicache.bench.common` has the code they share."""
