"""python -m workers.serve OPTIONS: vLLM's OpenAI server, the first process of an engine.

Options and behaviour are those of vLLM's own module, except for processes on CPUs. There vLLM *spawns* the
engine core and the workers, because OpenMP binds threads to cores when it is loaded. Each of these processes
imports torch and vLLM again, which takes half of an engine's start on two cores, and 0.4 GiB that they could
share. A single worker also has its own process, so that every token waits for two messages.

A fleet's engines do not bind threads to cores. So this module forks the processes, and runs a single worker
in the engine core's process, as vLLM does on GPUs. It does neither if VLLM_WORKER_MULTIPROC_METHOD=spawn is
set. With `distributed-executor-backend: mp` or data parallel ranks, vLLM's own rules apply.
"""

import gc
import os
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress

from setproctitle import getproctitle

from kvtransfer.parent_death import die_with_parent
from workers.engine.grammars.compile_process import new_address, start_process
from workers.engine.grammars.config import ADDRESS

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
NOT_BOUND = "nobind"


def bound() -> Iterator[int]:
    """Yield the file descriptors of this process's TCP sockets that are bound and not connected."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the descriptor of the listing itself is closed
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as one:
                inet = one.family in (socket.AF_INET, socket.AF_INET6)
                if inet and one.getsockname()[1] and not _is_connected(one):
                    yield descriptor


def _is_connected(one: socket.socket) -> bool:
    try:
        one.getpeername()
    except OSError:
        return False
    return True


def detach_from_server() -> None:
    """Detach a forked process from the server.

    The process ends with its parent; vLLM's own means would miss the death, because other forks inherit its
    pipe. Listening sockets are replaced, so that clients do not wait for a server that died. Signals no
    longer wake the server's event loop.
    """
    die_with_parent()
    signal.set_wakeup_fd(-1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in list(bound()):
        os.dup2(nothing, descriptor, inheritable=False)  # not closed: objects here hold the number
    os.close(nothing)


def main() -> None:
    getproctitle()  # finds the memory of the title, which fails once the environment has changed
    os.environ[ADDRESS] = new_address()
    gc.disable()  # imports leave little garbage, and looking for it takes a seventh of their CPU time
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    gc.enable()
    start_process(os.environ[ADDRESS])
    if os.environ.get(BINDING) == NOT_BOUND and os.environ.get(METHOD) != "spawn":
        from kvtransfer.compat.relied_on import verify
        from workers.engine.compat.cpu_build import STARTING, fork_engine_on_cpu

        verify(STARTING)
        fork_engine_on_cpu()
        os.register_at_fork(after_in_child=detach_from_server)
    serve()


if __name__ == "__main__":
    main()
