"""Let SGLang's schedulers run on a machine without GPU. Python imports this file if its folder is on PYTHONPATH."""

import sys

if "--multiprocessing-fork" in sys.orig_argv:
    import sglang_on_cpu

    sglang_on_cpu.prepare()
    sglang_on_cpu.copy_with_torch()
