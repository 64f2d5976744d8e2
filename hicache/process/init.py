"""Handles the duties of process 1 of a container, which the kernel treats differently from other processes.

No signal ends process 1 by default, so a SIGTERM is lost until the program has set a handler for it. Every orphan of
the container becomes a child of process 1 and stays a zombie until process 1 waits for it. So if a command is started
as process 1, it continues in a child process, where signals work normally. Process 1 forwards signals to the child and
waits for ended processes, as tini and dumb-init do.
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
    """If this process is process 1, fork and return only in the child; otherwise return immediately. Call this function
    before threads are started."""
    if os.getpid() == _INIT:
        supervise()


def supervise() -> None:
    """Fork and return only in the child. This process ends when the child ends. The exit status of this process is the
    exit status of the child, or 128 plus the number of the signal that killed the child."""
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
        # a process sent the signal; a signal of the terminal also reaches the child directly
        elif received.si_code <= 0:
            os.kill(child, received.si_signo)


def _reap(child: int) -> None:
    """Wait for all ended processes, so that they are no zombies. If the child has ended, end this process."""
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
