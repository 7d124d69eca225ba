"""Process beside an engine's front end that compiles grammars, each in a fork that has a budget.

The process itself never compiles: it loads the tokenizer once and forks for each connection, so a fork starts
within milliseconds, and the kernel ends it when it has used its CPU time or memory. Who asks kills it when it
takes too long. What comes back is plain JSON: a fork has run native code on a stranger's input.

A connection begins with one byte. `C`: the engine's configuration follows, pickled, and `{}` or an error
comes back. `G`: a grammar as JSON follows; first the fork's pid comes back, then what the grammar is.
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

CONFIGURE, COMPILE = b"C", b"G"
LENGTH = struct.Struct("!I")
TITLE = "conserve: grammars"
ENDED_FIRST = 1000  # oom_score_adj: before any engine
_READ_LIMIT_S = 10.0
_MOST_BYTES = 64 << 20


def start_process(address: str) -> int:
    """Fork the compiling process; call it before this process has threads. Returns its pid."""
    gc.freeze()  # pages that nobody writes to stay shared
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent()
            serve(address, GrammarBudget.from_environment(os.environ))
        finally:
            os._exit(1)
    return pid


def restart_process(address: str) -> int:
    """Start it again after it was killed. A process with threads must not fork, so this imports vLLM anew."""
    argv = [sys.executable, "-m", "workers.engine.grammars.compile_process"]
    return subprocess.Popen(argv, env={**os.environ, ADDRESS: address}, stdin=subprocess.DEVNULL).pid


def new_address() -> str:
    """Return a name in Linux' abstract namespace: it needs no file and ends with its process."""
    return f"conserve-grammars-{os.urandom(12).hex()}"


def serve(address: str, budget: GrammarBudget) -> None:
    """Answer until this process is ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks need no burial
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["VLLM_REGEX_COMPILATION_TIMEOUT_S"] = "0"  # it ends nothing; a fork has limits that do
    setproctitle(TITLE)  # or it would look like the server that it was forked from
    _end_first()
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
                    except Exception as wrong:  # noqa: BLE001 - who asked says it
                        send(connection, json.dumps({"error": repr(wrong)}).encode())
                elif kind == COMPILE and compiler is not None and os.fork() == 0:
                    _answer(listener, connection, compiler, budget)


def _answer(
    listener: socket.socket, connection: socket.socket, compiler: "GrammarCompiler", budget: GrammarBudget
) -> None:
    """Compile one grammar in this fork, and end."""
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
    """Let the kernel end this fork at its CPU limit, and grant it no more memory than its budget has."""
    cpu_s = math.ceil(budget.cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    with open("/proc/self/statm") as file:
        data_bytes = int(file.read().split()[5]) * resource.getpagesize()
    data_limit = data_bytes + budget.memory_mib * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (data_limit, data_limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end_first() -> None:
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(ENDED_FIRST))


def _is_ours(connection: socket.socket) -> bool:
    """An abstract name has no permissions: only processes of this user are answered."""
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
    """vLLM's own validation and compilation of a grammar, with the engine's tokenizer and backend."""

    def __init__(self, vllm_config: Any) -> None:
        from workers.engine.compat.grammar_checks import Backends

        self._backends = Backends(vllm_config)
        gc.freeze()

    def compile(self, constraint: dict[str, Any]) -> dict[str, Any]:
        """Return what vLLM's validation set (`set`), or why the grammar is none (`invalid`)."""
        try:
            return {"set": self._backends.compile(constraint)}
        except Exception as wrong:  # noqa: BLE001 - each backend has its own
            return failure(wrong)


def failure(wrong: Exception) -> dict[str, Any]:
    """Return the outcome of a compilation that raised. Without memory a backend says `std::bad_alloc`, and
    vLLM that the grammar is not valid because of it."""
    if isinstance(wrong, MemoryError) or "bad_alloc" in str(wrong):
        return {"over_budget": True}
    return {"invalid": str(wrong)[:1000]}


def main() -> None:
    die_with_parent()
    serve(os.environ[ADDRESS], GrammarBudget.from_environment(os.environ))


if __name__ == "__main__":
    main()
