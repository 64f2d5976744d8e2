"""Tier 1: the tensors that hold attention state on the device, and the table from requests to their slots."""

from hicache.device.base import KVCache, LayerWaiter
from hicache.device.mha import MHATokenToKVPool
from hicache.device.req_to_token import ReqToTokenPool

__all__ = ["KVCache", "LayerWaiter", "MHATokenToKVPool", "ReqToTokenPool"]
