"""Makes processes end when their parent ends.

vLLM's engine core and workers are children of its front end. If the front end were killed, they would keep
memory and the accelerator, so Linux is told to kill them then.
"""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies. No process of an engine has state to save."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent died before prctl
        os.kill(os.getpid(), signal.SIGKILL)
