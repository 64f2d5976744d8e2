"""The benchmarks, one module for each. `hicache bench run NAME` runs one of them. `hicache.bench.common` has their
shared code."""
