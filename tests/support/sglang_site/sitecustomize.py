"""On PYTHONPATH: SGLang's processes run on a machine without GPU."""

import sys

if {"--multiprocessing-fork", "hicache.bench.servers.sglang", "hicache.bench.servers.sessions_sglang"} & {
    *sys.orig_argv
}:
    import sglang_on_cpu

    sglang_on_cpu.prepare()
    sglang_on_cpu.copy_with_torch()
