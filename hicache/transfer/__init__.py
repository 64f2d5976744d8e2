"""Copies between device slots and host pages."""

from hicache.transfer.base import TransferBackend, TransferOp
from hicache.transfer.counter import LayerTransferCounter
from hicache.transfer.cpu import CpuTransfer
from hicache.transfer.cuda import CudaTransfer

__all__ = ["CpuTransfer", "CudaTransfer", "LayerTransferCounter", "TransferBackend", "TransferOp"]
