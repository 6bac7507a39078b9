"""Let the watchdog's thread receive SIGTERM and SIGINT.

Launchers send SIGTERM to all ranks as soon as one has ended, and the watchdog can still print why.
At SIGINT the main thread gets a KeyboardInterrupt, but not while it waits inside gloo.
"""

import atexit
import os
import select
import signal
import socket
import threading
from collections.abc import Callable

#: What Python writes at SIGTERM.
_SIGTERM = bytes([signal.SIGTERM])

Handler = Callable[..., object] | signal.Handlers


class SignalListener:
    """Lets a thread wait for SIGTERM and SIGINT, if the process has no other handler for SIGTERM,
    and no event loop that receives signals.

    Python runs handlers in the main thread, so not while that is inside gloo. But it writes the
    number of a signal to a file descriptor at once, here to a socket, which any thread can read.
    """

    def __init__(self) -> None:
        self._reads, self._writes = socket.socketpair()
        self._writes.setblocking(False)
        self.is_over = False
        self._is_on = False
        if threading.current_thread() is not threading.main_thread():
            return
        earlier = _listener()
        if earlier is not None and earlier.is_over:
            earlier.close()
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        if self._give_wakeup_fd(-1, self._writes.fileno()):
            self._is_on = True
            # A handler of any kind, or SIGTERM would end the process before the thread can print.
            signal.signal(signal.SIGTERM, self._at_signal)

    def _at_signal(self, *_: object) -> None:
        """Python's handler of SIGTERM, in the main thread."""
        if self.is_over:
            self.close()
            signal.raise_signal(signal.SIGTERM)
        else:
            # An event loop that was started since may have taken the file descriptor.
            self._writes.send(_SIGTERM)

    @staticmethod
    def _give_wakeup_fd(before: int, after: int) -> bool:
        """Set the file descriptor for signals, unless an event loop such as asyncio's has set its
        own; return whether it was set.
        """
        now = signal.set_wakeup_fd(after, warn_on_full_buffer=False)
        if now != before:
            signal.set_wakeup_fd(now)
        return now == before

    def wait(self, seconds: float) -> bytes:
        """Wait for signals; return those that came."""
        ready, _, _ = select.select([self._reads], [], [], seconds)
        signals = self._reads.recv(64) if ready else b""
        # The script may have set its own handler since.
        return signals if _listener() is self else signals.replace(_SIGTERM, b"")

    def interrupt(self) -> None:
        """End the wait in another thread."""
        self._writes.send(b"\0")

    def stop(self) -> None:
        """Note that no thread waits any more, so that SIGTERM ends the process."""
        self.is_over = True

    def close(self) -> None:
        """Restore the default action of SIGTERM, once no thread waits any more."""
        self.stop()
        if self._is_on:
            # Python allows that only in the main thread, and goes on writing signals to the socket.
            # So both stay, and the handler closes the socket at the next SIGTERM.
            if threading.current_thread() is not threading.main_thread():
                return
            self.give_back(signal.SIG_DFL)
        self._reads.close()
        self._writes.close()

    def give_back(self, handler: Handler) -> None:
        """Set another handler of SIGTERM, unless the script has set one since."""
        if self._is_on:
            self._is_on = False
            self._give_wakeup_fd(self._writes.fileno(), -1)
            if _listener() is self:
                signal.signal(signal.SIGTERM, handler)

    def ignore(self) -> None:
        """Ignore SIGTERM, so that it does not change the exit code of a process that is ending."""
        self.give_back(signal.SIG_IGN)

    def let_finish(self, seconds: float) -> None:
        """Give the process some seconds after SIGTERM to end with its own exit code."""

        def end_soon(*_: object) -> None:
            timer = threading.Timer(seconds, os._exit, [1])
            timer.daemon = True
            timer.start()

        if self._is_on:
            self.give_back(end_soon)
            # At shutdown Python removes its handlers, but it leaves an ignored signal ignored.
            atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)


def _listener() -> SignalListener | None:
    """The listener that handles SIGTERM in this process, if there is one."""
    handler = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return handler if isinstance(handler, SignalListener) else None


# A process that the script forks inherits the handler, and writes its signals to the same socket,
# so terminating it would terminate this process. So the child restores the default action, and
# SIGTERM is blocked until it has.


def _before_fork() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _after_fork_in_child() -> None:
    if listener := _listener():
        listener.give_back(signal.SIG_DFL)
    _after_fork()


#: The signals that were blocked in a thread before it forked.
_masks = threading.local()
os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork,
    after_in_child=_after_fork_in_child,
)
