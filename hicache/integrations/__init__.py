"""hicache under the servers that people run: one folder a server, and what all of them use.

    vllm, sglang   the plug-ins, each loaded by its server from JSON
    server_store   the page store of one server, beside those of others in one directory, and its settings
    staging        shared pages between a store process and a server whose memory it cannot share
    versions       which releases of a server are supported

Nothing outside imports this package, and no folder imports another.
"""
