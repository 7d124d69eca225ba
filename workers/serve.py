"""python -m workers.serve OPTIONS: vLLM's OpenAI server, the first process of an engine.

Options and behaviour are those of vLLM's own module, but for its processes on CPUs. There vLLM *spawns* the
engine core and the workers, and each imports torch and vLLM again: half of an engine's start on two cores,
and 0.4 GiB that they could share. An only worker has a process, too: each token waits for two messages to it
and back. It does so since threads are bound to cores when OpenMP is loaded. Where nothing is bound, as in a
fleet's engines, they are forked, and an only worker is in the engine core's process as
it is on GPUs, unless the environment has VLLM_WORKER_MULTIPROC_METHOD=spawn. With the engine's option
`distributed-executor-backend: mp`, and with data parallel ranks, workers have processes as vLLM has it.
"""

import os
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress

from kvtransfer.parent_death import die_with_parent
from workers.engine.grammars.compile_process import new_address, start_process
from workers.engine.grammars.config import ADDRESS

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
NOT_BOUND = "nobind"


def bound() -> Iterator[int]:
    """Descriptors of this process at which others can connect, now or as soon as it listens."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the listing's own is closed
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


def let_go_of_the_server() -> None:
    """In a forked process: it ends with its parent (what tells vLLM of a death is held by other forks, too),
    who connects does not wait for a server that died, and signals are its own."""
    die_with_parent()
    signal.set_wakeup_fd(-1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in list(bound()):
        os.dup2(nothing, descriptor, inheritable=False)  # not closed: objects here hold the number
    os.close(nothing)


def main() -> None:
    os.environ[ADDRESS] = new_address()
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    start_process(os.environ[ADDRESS])
    if os.environ.get(BINDING) == NOT_BOUND and os.environ.get(METHOD) != "spawn":
        from kvtransfer.compat.relied_on import verify
        from workers.engine.compat.cpu_build import STARTING, fork_engine_on_cpu

        verify(STARTING)
        fork_engine_on_cpu()
        os.register_at_fork(after_in_child=let_go_of_the_server)
    serve()


if __name__ == "__main__":
    main()
