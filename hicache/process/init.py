"""Process 1 of a container, which the kernel treats differently from other processes.

No signal ends process 1 by default, so a SIGTERM is lost until a program has set its handlers. Every orphan of the
container becomes a child of process 1 and stays a zombie until process 1 waits for it. If a command is started as
process 1, it therefore continues in a child, where signals work normally; process 1 forwards signals to the child and
reaps ended processes. tini and dumb-init do the same.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from typing import NoReturn

_INIT = 1
_OF_DEFECTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT}
_NOT_PASSED_ON = {*_OF_DEFECTS, signal.SIGKILL, signal.SIGSTOP}


def leave_process_1() -> None:
    """If this process is process 1, fork and return in the child; else return at once. Call it before threads are
    started."""
    if os.getpid() == _INIT:
        supervise()


def supervise() -> None:
    """Fork and return in the child. This process ends when the child ends: with its status, or with 128 plus its
    signal."""
    passed_on = signal.valid_signals() - _NOT_PASSED_ON
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    child = os.fork()
    if child:
        _pass_on(passed_on, child)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pass_on(signals: Collection[int], child: int) -> NoReturn:
    while True:
        received = signal.sigwaitinfo(signals)
        if received.si_signo == signal.SIGCHLD:
            _reap(child)
        # the signal was sent by a process; signals of the terminal reach the child directly
        elif received.si_code <= 0:
            os.kill(child, received.si_signo)


def _reap(child: int) -> None:
    """Reap all ended processes. If the child is among them, end this process."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
