"""Reads the key that encrypts stored pages from a file or the environment. No message shows any part of the key."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from hicache.config import DiskConfig, RemoteConfig
from hicache.config.environment import disk_key
from hicache.errors import ConfigError
from hicache.storage.cipher import PageCipher

KEY_BYTES = 32
_HEX_DIGITS = 2 * KEY_BYTES


def cipher_of(config: DiskConfig | RemoteConfig) -> PageCipher | None:
    """Return the configured cipher; None: pages are not encrypted. Raises ConfigError if the key is unreadable, or if
    two keys are given."""
    key = key_of(config)
    return PageCipher(key) if key else None


def key_of(config: DiskConfig | RemoteConfig) -> bytes:
    """Return the configured key; b"": pages are not encrypted. Raises ConfigError if the key is unreadable, or if two
    keys are given."""
    tier = "disk" if isinstance(config, DiskConfig) else "remote"
    key = disk_key()
    if key and config.key_file:
        raise ConfigError(f"{tier} key_file and HICACHE_DISK_KEY are both set; give the key in one of them")
    if key:
        return _parse(key, "HICACHE_DISK_KEY")
    if not config.key_file:
        return b""
    return key_at(Path(config.key_file), f"{tier} key_file")


def key_at(path: Path, setting: str = "--new-key-file") -> bytes:
    """Return the key in a file. Raises ConfigError, which names `setting`, if the file has no valid key."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {setting}={path}: {error.strerror}") from None
    return data if len(data) == KEY_BYTES else _parse(data, f"{setting}={path}")


def _parse(data: bytes, where: str) -> bytes:
    """Return the key that `data` contains as 64 hex digits or in base64, ignoring surrounding white space. `where`: the
    source of the key, for the error."""
    text = data.strip()
    try:
        key = bytes.fromhex(text.decode()) if len(text) == _HEX_DIGITS else base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"{where} has no valid key: a key is {KEY_BYTES} bytes, {_HEX_DIGITS} hex digits or their base64, "
            f"as `openssl rand -hex {KEY_BYTES}` writes"
        )
    return key
