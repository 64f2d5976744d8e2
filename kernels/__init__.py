"""Device kernels, each with a torch twin that defines what it computes.

One operation per file. The entry function takes `kernels`, "triton" or "torch", which its caller chose once for its
device. Wrong arguments raise `ValueError`. Without Triton the modules import, and a launch raises `ImportError`.
"""
