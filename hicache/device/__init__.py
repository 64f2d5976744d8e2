"""Tier 1: the tensors of KV and recurrent states on the device, and the table that maps requests to slots."""

from hicache.device.ascend import AscendMLAPagedTokenToKVPool, AscendTokenToKVPool
from hicache.device.base import KVCache, LayerWaiter, SlotSpace
from hicache.device.capacity import plan_capacity
from hicache.device.double_sparse import DoubleSparseTokenToKVPool
from hicache.device.hybrid import HybridLinearKVPool
from hicache.device.hybrid_req import HybridReqToTokenPool, HybridRequest
from hicache.device.mamba import Mamba2CacheParams, Mamba2StateShape, MambaPool, MambaState, SpeculativeMambaState
from hicache.device.mha import MHATokenToKVPool
from hicache.device.mla import MLATokenToKVPool
from hicache.device.nsa import DSATokenToKVPool, NSATokenToKVPool
from hicache.device.quantized import QuantizedKVCache, QuantizedLayer
from hicache.device.req_to_token import ReqToTokenPool
from hicache.device.rows import Row, RowPool
from hicache.device.swa import SWAKVPool

__all__ = [
    "AscendMLAPagedTokenToKVPool",
    "AscendTokenToKVPool",
    "DSATokenToKVPool",
    "DoubleSparseTokenToKVPool",
    "HybridLinearKVPool",
    "HybridReqToTokenPool",
    "HybridRequest",
    "KVCache",
    "LayerWaiter",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "Mamba2CacheParams",
    "Mamba2StateShape",
    "MambaPool",
    "MambaState",
    "NSATokenToKVPool",
    "QuantizedKVCache",
    "QuantizedLayer",
    "ReqToTokenPool",
    "Row",
    "RowPool",
    "SWAKVPool",
    "SlotSpace",
    "SpeculativeMambaState",
    "plan_capacity",
]
