"""A process that does not outlive its parent.

vLLM's engine core and workers are children of its front end; when that is killed they go on, holding memory
and the accelerator. Linux can end them instead.
"""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Nothing here has state to save, so the signal is the one that cannot be caught."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), signal.SIGKILL)
