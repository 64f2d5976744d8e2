"""Plug-ins for vLLM, which imports them by name: `"module_path": "hicache.integrations.vllm"`.

A name is imported when vLLM first uses it. hicache then connects its log to vLLM's, and checks that this vLLM has what
the plug-in uses.
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
