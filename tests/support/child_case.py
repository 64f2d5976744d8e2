"""Work in a process of its own, which may crash, hang or eat up memory."""

from __future__ import annotations

import json
import os
import resource
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hicache.storage import StoreError

_MOST_S, _MOST_BYTES = 60, 4 << 30


def in_child(work: Callable[[], dict[str, Any]], result: Path) -> dict[str, Any]:
    """What `work` says, by way of the file `result`: `error` for a store's, `failed` for whatever else ended it."""
    result.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        said: dict[str, Any] = {"failed": "it ended"}
        try:
            signal.alarm(_MOST_S)
            resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
            os.close(2)
            said = work()
        except StoreError as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        except Exception:  # noqa: BLE001 - whatever it is, the test reports it
            said = {"failed": traceback.format_exc()}
        finally:
            result.write_text(json.dumps(said))
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return {"failed": f"signal {os.WTERMSIG(status)}"}
    found: dict[str, Any] = json.loads(result.read_text())
    return found
