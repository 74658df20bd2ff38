"""The pipe that ties a child to its parent: when the parent dies, however it dies, the child ends.

The parent holds the only write end; the kernel closes it with the process, and the child reads the
end of file.
"""

import os
import signal
import threading
import time

GRACE_SECONDS = 20.0


def hold_on(descriptor: int) -> None:
    """Watch the read end from a thread; at its end send this process SIGTERM, then end it for good."""
    threading.Thread(target=_watch, args=(descriptor,), name="lifeline", daemon=True).start()


def _watch(descriptor: int) -> None:
    while os.read(descriptor, 1):
        continue
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)
