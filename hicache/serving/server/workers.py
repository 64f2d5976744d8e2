"""Where bodies become prompts, beside the event loop: small ones on a thread, each other one in a process of its own.

To parse and tokenize a large body takes seconds, most of them under the interpreter's lock, and nothing but the end of
its process stops it. So such a process ends as soon as the other end of its socket is closed: when the client has left,
when its time is up, or when the server has ended. All are forked from one that loaded the tokenizer before the server
had threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import numpy as np

from hicache.process.logs import described
from hicache.serving.models import Tokenizer
from hicache.serving.server.prompts import BODIES, Prepared, Prompt, PromptEncoder, PromptLimits
from hicache.serving.server.replies import ApiError, internal_error, unavailable
from hicache.storage.memory import usable_cpus

_SMALL_BYTES = 128 << 10  # parsed and tokenized in less time than a fork takes, times ten
_NUM_THREADS = 2
_NICE = 5  # streams go first
_LENGTH = struct.Struct("<Q")

log = logging.getLogger(__name__)


class TokenizerProcess:
    """A process that holds a tokenizer, and forks another one for each job.

    It is forked from this one, which may not have threads yet. `load` runs in it. A job's socket carries its length and
    bytes, and in the other direction those of its answer, up to the end.
    """

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if not self._pid:
            self._control.close()
            _fork_jobs(theirs, load)
        theirs.close()

    @property
    def alive(self) -> bool:
        ends = select.poll()
        ends.register(self._control, 0)  # which leaves its end
        return not ends.poll(0)

    def connect(self) -> socket.socket:
        """The socket of a new job. Raises OSError where the process has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"job"], [theirs.fileno()])
        return ours

    def __enter__(self) -> TokenizerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)  # it may be loading
        os.waitpid(self._pid, 0)


class PromptWorkers:
    """Called on the event loop. `tokenizers`: None: all is done on threads."""

    def __init__(self, encoder: PromptEncoder, tokenizers: TokenizerProcess | None) -> None:
        self._encoder = encoder
        self._tokenizers = tokenizers
        self._threads = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "hicache-prompts")
        self._free_processes = asyncio.Semaphore(max(2, min(8, len(usable_cpus()) // 2)))

    async def prepare(self, kind: str, raw: bytes | bytearray) -> Prepared:
        """As `PromptEncoder.prepare`. Where the task is cancelled, what was not begun is not done, and a process
        ends."""
        if self._tokenizers is None or len(raw) <= _SMALL_BYTES:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._encoder.prepare, kind, raw)
        async with self._free_processes:
            self.require_alive()
            answer = await self._asked(self._tokenizers.connect(), _job(kind, self._encoder.limits, raw))
        return _prepared(kind, answer)

    def require_alive(self) -> None:
        """Raises the `ApiError` 503 where large bodies can no longer be taken."""
        if self._tokenizers is not None and not self._tokenizers.alive:
            raise unavailable(
                "the process that tokenizes long prompts has ended; the server has to be started again",
                "tokenizer_failed",
            )

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    async def _asked(self, connection: socket.socket, job: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        answer = b""
        try:
            writer.write(_LENGTH.pack(len(job)) + job)
            with contextlib.suppress(ConnectionError):
                answer = await reader.read()
        finally:
            writer.transport.abort()
        if not answer:
            log.error("the process of a large body ended without an answer")
            raise internal_error()
        return answer


def _fork_jobs(control: socket.socket, load: Callable[[], Tokenizer]) -> NoReturn:
    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # they are for the server, which ends this process
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # jobs are not waited for
        tokenizer = load()
        while True:
            message, descriptors, *_ = socket.recv_fds(control, 8, 1)
            if not message:
                break
            if not os.fork():
                control.close()
                _run_job(socket.socket(fileno=descriptors[0]), tokenizer)
            os.close(descriptors[0])
        status = 0
    finally:
        os._exit(status)


def _run_job(job: socket.socket, tokenizer: Tokenizer) -> NoReturn:
    try:
        with contextlib.suppress(OSError):  # a container may refuse either
            os.nice(_NICE)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("500")  # where memory ends, rather this one than the server
        stream = job.makefile("rb")
        given = stream.read(*_LENGTH.unpack(stream.read(_LENGTH.size)))
        threading.Thread(target=_end_with, args=(job,), daemon=True).start()
        job.sendall(_done(tokenizer, given))
    except Exception as error:
        job.sendall(json.dumps({"failure": described(error)}).encode())
        raise
    finally:
        os._exit(0)


def _end_with(job: socket.socket) -> None:
    """Nothing more comes: what wakes this thread is that the server has closed the socket."""
    job.recv(1)
    os._exit(1)


# A job is a line of JSON and the body; its answer a line of JSON and the tokens of all prompts, int64. What fails is
# logged by the server: a forked process has no thread that writes lines.


def _job(kind: str, limits: PromptLimits, raw: bytes | bytearray) -> bytes:
    return json.dumps({"kind": kind, "limits": dataclasses.asdict(limits)}).encode() + b"\n" + raw


def _done(tokenizer: Tokenizer, job: bytes) -> bytes:
    head, _, raw = job.partition(b"\n")
    asked = json.loads(head)
    try:
        prepared = PromptEncoder(tokenizer, PromptLimits(**asked["limits"])).prepare(asked["kind"], raw)
    except ApiError as error:
        refusal = {"status": error.status, "headers": error.headers, **error.body["error"]}
        return json.dumps({"refusal": refusal}).encode()
    shapes = [(len(each.tokens), each.max_new_tokens, each.text, each.shared_len) for each in prepared.prompts]
    checked = prepared.body.model_dump_json(exclude_unset=True)
    line = json.dumps({"body": checked, "prompts": shapes, "ignored": prepared.ignored}).encode()
    return b"\n".join([line, b"".join(prompt.tokens.tobytes() for prompt in prepared.prompts)])


def _prepared(kind: str, answer: bytes) -> Prepared:
    line, _, raw = answer.partition(b"\n")
    head = json.loads(line)
    if failure := head.get("failure"):
        log.error("a body could not be made a prompt", extra={"fields": failure})
        raise internal_error()
    if refusal := head.get("refusal"):
        raise ApiError(
            refusal["status"],
            refusal["message"],
            kind=refusal["type"],
            param=refusal["param"],
            code=refusal["code"],
            headers=refusal["headers"],
        )
    tokens, start, prompts = np.frombuffer(raw, dtype=np.int64), 0, []
    for num_tokens, *others in head["prompts"]:
        prompts.append(Prompt(tokens[start : start + num_tokens], *others))
        start += num_tokens
    return Prepared(BODIES[kind].model_validate_json(head["body"]), prompts, tuple(head["ignored"]))
