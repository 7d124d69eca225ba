"""A process forked from an engine's server neither listens on its port nor wakes it."""

import subprocess
import sys

# A server with a bound and a connected socket, whose signals wake its loop. Its fork checks what it inherits.
FORKS = """
import os, signal, socket
from workers.serve import bound, detach_from_server
os.register_at_fork(after_in_child=detach_from_server)
server, (here, there) = socket.socket(), socket.socketpair()
server.bind(("127.0.0.1", 0))  # vLLM's server listens after its engine has started
here.setblocking(False)
signal.set_wakeup_fd(here.fileno())
assert list(bound()) == [server.fileno()]
child = os.fork()
if child == 0:
    assert not list(bound())
    assert signal.set_wakeup_fd(-1) == -1
    there.send(b"alive")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
signal.set_wakeup_fd(-1)
assert here.recv(5) == b"alive", "what was connected before stays"
assert list(bound()) == [server.fileno()], "and the server's own"
keeping = os.fork()
if keeping == 0:
    there.send(b"forked")
    signal.pause()
here.setblocking(True)
assert here.recv(6) == b"forked"
server.listen()
port = server.getsockname()[1]
server.close()
try:
    socket.create_connection(("127.0.0.1", port), timeout=5)
except ConnectionRefusedError:
    print("refused")
finally:
    os.kill(keeping, signal.SIGKILL)
    os.waitpid(keeping, 0)
"""


def test_a_fork_neither_listens_nor_wakes_the_server() -> None:
    command = [sys.executable, "-c", FORKS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "refused\n"), ended.stderr
