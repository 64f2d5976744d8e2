"""Bytes between tier 1 and tier 2."""

from hicache.transfer.base import TransferBackend, TransferOp
from hicache.transfer.counter import LayerTransferCounter
from hicache.transfer.cpu import CpuTransfer
from hicache.transfer.cuda import CudaTransfer

__all__ = ["CpuTransfer", "CudaTransfer", "LayerTransferCounter", "TransferBackend", "TransferOp"]
