"""Plug-ins for vLLM, which imports them by name: `"module_path": "hicache.integrations.vllm"`.

A name is imported when vLLM first uses it. Before that, the release of vLLM is checked, and hicache's log is connected
to vLLM's.
"""

from hicache.integrations.vllm.release import vllm_release
from hicache.integrations.vllm.server_log import log_through_vllm
from hicache.public_names import on_first_use

_load, __dir__ = on_first_use(__name__, globals())


def __getattr__(name: str) -> object:
    if not name.startswith("__"):
        vllm_release()
        log_through_vllm()
    return _load(name)
