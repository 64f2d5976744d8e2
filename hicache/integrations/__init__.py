"""Plug-ins for inference servers: one folder for each server, and modules that the plug-ins share.

    vllm, sglang   the plug-ins, each loaded by its server from JSON
    server_store   the page store of one server in a directory that other servers may also use, and its settings
    staging        shared pages through which a store process serves a server whose memory it cannot share
    versions       the supported releases of each server

No other package imports this one, and no folder imports another.
"""
