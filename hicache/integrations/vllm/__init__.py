"""Plug-ins for vLLM, which imports them by name: `"module_path": "hicache.integrations.vllm"`.

A name is loaded when vLLM asks for it, after the release of vLLM was found to be one of the tested.
"""

from hicache.integrations.vllm.release import vllm_release
from hicache.public_names import on_first_use

_load, __dir__ = on_first_use(__name__, globals())


def __getattr__(name: str) -> object:
    if not name.startswith("__"):
        vllm_release()
    return _load(name)
