"""Process beside an engine's front end that compiles grammars, each in a fork with a budget.

The process itself never compiles. It loads the tokenizer once and forks for each grammar, so that a fork
starts within milliseconds. The kernel ends a fork that exceeds its CPU time or memory, and the front end
kills a fork that takes too long. A fork answers in plain JSON, because it has run native code on a client's
input and is not trusted.

A connection begins with one byte. After `C` comes the engine's pickled configuration; the answer is `{}` or
an error. After `G` comes a grammar as JSON; the answers are the fork's pid, then the outcome.
"""

import gc
import json
import math
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from typing import Any

from setproctitle import setproctitle

from kvtransfer.parent_death import die_with_parent
from workers.engine.grammars.config import ADDRESS, MIB, GrammarBudget
from workers.oom_score import OomScore, set_oom_score

CONFIGURE, COMPILE = b"C", b"G"
LENGTH = struct.Struct("!I")
TITLE = "conserve: grammars"
_READ_LIMIT_S = 10.0
_MOST_BYTES = 64 << 20


def start_process(address: str) -> int:
    """Fork the compiling process and return its pid. This process must not have threads yet."""
    gc.freeze()  # so that unchanged pages stay shared
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent()
            serve(address, GrammarBudget.from_environment(os.environ))
        finally:
            os._exit(1)
    return pid


def restart_process(address: str) -> int:
    """Start the killed process again and return its pid. This process has threads, so it may not fork."""
    argv = [sys.executable, "-m", "workers.engine.grammars.compile_process"]
    return subprocess.Popen(argv, env={**os.environ, ADDRESS: address}, stdin=subprocess.DEVNULL).pid


def new_address() -> str:
    """Return a name in Linux's abstract socket namespace, which needs no file and ends with its process."""
    return f"conserve-grammars-{os.urandom(12).hex()}"


def serve(address: str, budget: GrammarBudget) -> None:
    """Answer connections, with a fork for each grammar, until this process is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps forks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["VLLM_REGEX_COMPILATION_TIMEOUT_S"] = "0"  # the fork's own limits end a compilation
    setproctitle(TITLE)  # instead of the title of the server that it was forked from
    set_oom_score(OomScore.GRAMMARS)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{address}")
    listener.listen(128)
    compiler: GrammarCompiler | None = None
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_READ_LIMIT_S)
            with suppress(OSError, EOFError):
                if not _is_ours(connection):
                    continue
                kind = connection.recv(1)
                if kind == CONFIGURE:
                    try:
                        compiler = compiler or GrammarCompiler(pickle.loads(receive(connection)))
                        send(connection, b"{}")
                    except Exception as wrong:  # noqa: BLE001 - the front end reports it
                        send(connection, json.dumps({"error": repr(wrong)}).encode())
                elif kind == COMPILE and compiler is not None and os.fork() == 0:
                    _answer(listener, connection, compiler, budget)


def _answer(
    listener: socket.socket, connection: socket.socket, compiler: "GrammarCompiler", budget: GrammarBudget
) -> None:
    """Compile the grammar that the connection sends, answer with the outcome, and end this fork."""
    try:
        listener.close()
        die_with_parent()
        send(connection, str(os.getpid()).encode())
        _limit(budget)
        constraint = json.loads(receive(connection))
        send(connection, json.dumps(compiler.compile(constraint)).encode())
    finally:
        os._exit(0)


def _limit(budget: GrammarBudget) -> None:
    """Limit this fork to the CPU time and memory of its budget."""
    cpu_s = math.ceil(budget.cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    with open("/proc/self/statm") as file:
        data_bytes = int(file.read().split()[5]) * resource.getpagesize()
    data_limit = data_bytes + budget.memory_mib * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (data_limit, data_limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _is_ours(connection: socket.socket) -> bool:
    """Return whether the client runs as the same user; an abstract socket name is open to every user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())


def send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    if length > _MOST_BYTES:
        raise EOFError
    return _exactly(connection, length)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        if not (part := connection.recv(min(size, MIB))):
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class GrammarCompiler:
    """Compiler of grammars: vLLM's own validation and compilation with the engine's tokenizer and backend."""

    def __init__(self, vllm_config: Any) -> None:
        from workers.engine.compat.grammar_checks import Backends

        self._backends = Backends(vllm_config)
        gc.freeze()

    def compile(self, constraint: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that vLLM's validation set (`set`), or why the grammar is invalid (`invalid`)."""
        try:
            return {"set": self._backends.compile(constraint)}
        except Exception as wrong:  # noqa: BLE001 - each backend has its own errors
            return failure(wrong)


def failure(wrong: Exception) -> dict[str, Any]:
    """Return the outcome of a compilation that raised an exception.

    When memory runs out, a backend may raise `std::bad_alloc`, and vLLM then calls the grammar invalid.
    """
    if isinstance(wrong, MemoryError) or "bad_alloc" in str(wrong):
        return {"over_budget": True}
    return {"invalid": str(wrong)[:1000]}


def main() -> None:
    die_with_parent()
    serve(os.environ[ADDRESS], GrammarBudget.from_environment(os.environ))


if __name__ == "__main__":
    main()
