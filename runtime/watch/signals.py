"""SIGTERM, which launchers send to all ranks as soon as one has ended, comes to a thread that can
still say why.

So does SIGINT, for which the main thread has an exception, but not before it comes out of gloo.
"""

import atexit
import os
import select
import signal
import socket
import threading


class SignalBell:
    """Rings at SIGTERM and SIGINT, where the process has no handler of its own for SIGTERM.

    A Python handler alone would not run while the main thread is inside gloo; the wakeup descriptor
    is written to at once, and any thread can wait for it.
    """

    def __init__(self) -> None:
        self._bell, self._button = socket.socketpair()
        self._button.setblocking(False)
        self._hung = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if self._hung:
            signal.signal(signal.SIGTERM, lambda *_: None)
            signal.set_wakeup_fd(self._button.fileno(), warn_on_full_buffer=False)

    def wait(self, seconds: float) -> bytes:
        """Wait; the signals that came."""
        ready, _, _ = select.select([self._bell], [], [], seconds)
        return self._bell.recv(64) if ready else b""

    def interrupt(self) -> None:
        """End the wait in another thread."""
        self._button.send(b"\0")

    def take_down(self) -> None:
        """Let SIGTERM be what it was."""
        if self._hung and threading.current_thread() is threading.main_thread():
            self._hung = False
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def ignore(self) -> None:
        """From now on, SIGTERM does not change the exit code of a process that is ending."""
        if self._hung:
            self._hung = False
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def let_finish(self, seconds: float) -> None:
        """From now on, SIGTERM leaves the process some seconds to end with its own exit code."""

        def end_soon(*_: object) -> None:
            timer = threading.Timer(seconds, os._exit, [1])
            timer.daemon = True
            timer.start()

        if self._hung:
            self._hung = False
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, end_soon)
            # Python takes its handlers away while it shuts down, but lets a signal be ignored.
            atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
