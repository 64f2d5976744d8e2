"""`hicache plan`: the tokens that a model's tiers hold on given hardware, the prefix length from which loading is
faster than computing, and settings to start with.

    presets   known models                           gpus     rates of known GPUs
    model     geometry, weights, work of a prefill   memory   tokens of each tier and the engine's settings
    times     time to load and time to compute       report   tables
    command   flags, hit rates of a trace, JSON

Imports `hicache.serving` for geometry and sizes. Reads no weights.
"""
