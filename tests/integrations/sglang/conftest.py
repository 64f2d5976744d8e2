"""Without SGLang the tests of this folder are not collected."""

from __future__ import annotations

import importlib.util

# This folder itself is found as a package of that name, without the module asked for.
if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("sglang").origin is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import sglang_on_cpu

    sglang_on_cpu.prepare()
