"""Settings of remote stores for tests: no call of a remote store takes too long."""

from __future__ import annotations

import dataclasses
from typing import Any

from hicache.storage.process.settings import ServiceSettings
from waiting import BOUND_S

_OF_REMOTE = ServiceSettings.of_remote
_IO_TIMEOUT_S = 1e8  # longer than any time by which a test advances its clock


def patient_remote(url: str, **more: Any) -> ServiceSettings:
    """The settings of `ServiceSettings.of_remote`, but no call of the store times out on a busy machine, or by the
    clock of a test."""
    settings = _OF_REMOTE(url, **more)
    limits = dataclasses.replace(settings.limits, io_timeout_s=_IO_TIMEOUT_S, close_s=BOUND_S)
    return dataclasses.replace(settings, limits=limits)
