"""Process 1 of a container, which the kernel treats unlike any other.

No signal ends process 1 by default, so a SIGTERM is lost until a program has set its handlers; and every orphan of the
container becomes its child, a zombie until it is waited for. As process 1 a command goes on in a child, with signals as
anywhere else, and what is left passes signals on and waits for whoever ends. tini and dumb-init do the same.
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
    """Return in a child of this process if it is process 1, else at once. To be called before there are threads."""
    if os.getpid() == _INIT:
        supervise()


def supervise() -> None:
    """Return in a child of this process, which ends as the child does: with its status, or 128 and its signal."""
    passed_on = signal.valid_signals() - _NOT_PASSED_ON
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    child = os.fork()
    if child:
        _pass_on(passed_on, child)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pass_on(signals: Collection[int], child: int) -> NoReturn:
    while True:
        came = signal.sigwaitinfo(signals)
        if came.si_signo == signal.SIGCHLD:
            _reap(child)
        elif came.si_code <= 0:  # sent by a process: the child has those of its terminal too
            os.kill(child, came.si_signo)


def _reap(child: int) -> None:
    """Wait for all that have ended, and end where the child is among them."""
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
