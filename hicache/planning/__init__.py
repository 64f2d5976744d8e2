"""`hicache plan`: what a model's tiers hold on given hardware, when loading pays, and the settings to start with.

    presets   known models                           gpus     rates of known GPUs
    model     geometry, weights, work of a prefill    memory   tokens of each tier and the engine's settings
    times     loading beside computing                report   tables
    command   flags, hit rates of a trace, JSON

Above `serving`, whose geometry and sizes it uses; no weights are read.
"""
