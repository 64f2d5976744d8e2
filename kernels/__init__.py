"""Device kernels, each with a torch twin that defines its result.

One operation per file. The entry function takes `kernels`, "triton" or "torch", which its caller chose once for its
device. Wrong arguments raise `ValueError`. Without Triton the modules import, and a launch raises `ImportError`.

The names below are SGLang's names of the kernels; their launch parameters are described in our files.
"""

from hicache.kernels.alloc_decode import alloc_decode_kernel
from hicache.kernels.alloc_extend import alloc_extend_kernel
from hicache.kernels.last_loc import get_last_loc_triton
from hicache.kernels.mla import get_mla_kv_buffer_kernel, set_mla_kv_buffer_kernel
from hicache.kernels.write_req_to_token import write_req_to_token_pool_triton

__all__ = [
    "alloc_decode_kernel",
    "alloc_extend_kernel",
    "get_last_loc_triton",
    "get_mla_kv_buffer_kernel",
    "set_mla_kv_buffer_kernel",
    "write_req_to_token_pool_triton",
]
