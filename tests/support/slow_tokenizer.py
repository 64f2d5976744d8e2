"""A tokenizer for the processes that make prompts of large bodies, which import it by name."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hicache.serving.models import ByteTokenizer


class SlowTokenizer(ByteTokenizer):
    """Three texts are commands: "hang" sleeps for ever, after it has written its process's id to the file `pid`,
    "spin" computes for ever, "fail" raises."""

    def encode(self, text: str) -> list[int]:
        if text == "hang":
            Path("pid.new").write_text(str(os.getpid()))
            Path("pid.new").rename("pid")
            time.sleep(1e6)
        while text == "spin":
            pass
        if text == "fail":
            raise ValueError(text)
        return super().encode(text)
