"""A tokenizer for the processes that encode the prompts of large bodies. The processes import this tokenizer by
name."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hicache.serving.models import ByteTokenizer


class SlowTokenizer(ByteTokenizer):
    """A tokenizer with three texts as commands: "hang" writes the id of its process to the file `pid` and sleeps for
    ever, "spin" computes for ever, "fail" raises."""

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
