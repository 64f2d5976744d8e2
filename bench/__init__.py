"""Benchmarks: one module each, run with `python -m bench run NAME`; `bench.common` is what they share."""
