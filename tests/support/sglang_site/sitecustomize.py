"""On PYTHONPATH: SGLang's processes run on a machine without GPU."""

import sys

BENCHES = {f"hicache.bench.servers.{name}" for name in ("sglang", "sessions_sglang")}

if {"--multiprocessing-fork", *BENCHES} & {*sys.orig_argv}:
    import sglang_on_cpu

    sglang_on_cpu.prepare()
    sglang_on_cpu.copy_with_torch()
