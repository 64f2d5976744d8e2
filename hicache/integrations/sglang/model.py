"""The fields of the identity that distinguish SGLang's models of the same name."""

from __future__ import annotations

from typing import Any

from hicache.integrations.weights import weights_digest


def model_identity(server_args: Any) -> dict[str, str | int]:
    """Return the identity of the model: the digest of its weights, or its revision if they are not on this machine.
    `server_args`: SGLang's `ServerArgs`. Raises ConfigError if the weights cannot
    be read."""
    path, revision = str(server_args.model_path), server_args.revision
    weights = weights_digest(path, revision, server_args.download_dir)
    unread = {} if weights else {"revision": str(revision)}
    return {
        **unread,
        "weights": weights,
        "weight_version": str(server_args.weight_version),
        "quantization": str(server_args.quantization),
    }
