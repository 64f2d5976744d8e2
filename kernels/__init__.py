"""Device kernels. Each kernel has a torch twin, which defines the kernel's result.

Each file has one operation. Its entry function takes `kernels`, "triton" or "torch", which the caller chooses once for
its device. Wrong arguments raise `ValueError`. Without Triton the modules can be imported, but a launch raises
`ImportError`.

The names imported here are SGLang's names of the kernels. The files describe the kernels' launch parameters.
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
