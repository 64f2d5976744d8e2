"""Plug-ins for vLLM. vLLM imports each plug-in by its name from `"module_path": "hicache.integrations.vllm"`.

The plug-in is imported when vLLM first uses its name. At this time hicache connects its log to vLLM's log, and checks
that this vLLM has all features that the plug-in uses.
"""

from hicache.integrations.vllm.features import PLUG_INS
from hicache.integrations.vllm.release import load_plug_in
from hicache.integrations.vllm.server_log import log_through_vllm
from hicache.public_names import on_first_use

_load, __dir__ = on_first_use(__name__, globals())


def __getattr__(name: str) -> object:
    if not name.startswith("__"):
        log_through_vllm()
    return load_plug_in(name, _load) if name in PLUG_INS else _load(name)
