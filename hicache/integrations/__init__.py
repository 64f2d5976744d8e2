"""Plug-ins for inference servers: one folder for each server, and modules that the plug-ins share.

    vllm, sglang   the plug-ins, each loaded by its server from JSON
    server_store   the page store of one server, next to stores of other servers in one directory, and its settings
    staging        shared pages between a store process and a server whose memory it cannot share
    versions       the supported releases of each server

No other package imports this one, and no folder imports another.
"""
