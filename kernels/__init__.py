"""Device kernels, each beside the torch twin that says what it computes.

The lowest layer: it may import torch, triton and numpy, and nothing of the package. One operation a file; the entry
function takes `kernels`, "triton" or "torch", which its caller chose once for its device. Wrong arguments raise
`ValueError`. Importing it works without Triton; launching a kernel then raises `ImportError`.
"""
