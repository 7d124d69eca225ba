"""A keeper measures its engine's memory and ends an engine over its limit."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from workers.engine_memory import GIB, MemoryLimit, session_bytes

MIB = 1 << 20
HOLDS = "import sys, time; held = bytearray(int(sys.argv[1])); print('holds', flush=True); time.sleep(60)"
FORKS = (
    "import os, sys, time; held = bytearray(int(sys.argv[1])); os.fork(); os.fork(); "
    "print('holds', flush=True); time.sleep(60)"
)


@contextmanager
def session(code: str, size: int) -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", code, str(size)], stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.2)  # until the child has forked
        try:
            yield child.pid
        finally:
            os.killpg(child.pid, 9)


def test_the_memory_of_a_session_is_the_sum_of_its_processes() -> None:
    with session(HOLDS, 200 * MIB) as leader:
        assert 200 * MIB < session_bytes(leader) < 230 * MIB


def test_memory_shared_by_forked_processes_counts_once_near_the_limit() -> None:
    with session(FORKS, 200 * MIB) as leader:
        assert 200 * MIB < session_bytes(leader) < 260 * MIB
        assert session_bytes(leader, enough=1 * GIB) > 600 * MIB  # an upper bound suffices here


def test_by_default_an_engine_may_grow_by_its_kv_and_a_quarter_of_the_machine() -> None:
    limit = MemoryLimit.of(None, kv_gib=2.0, idle_bytes=1 * GIB, machine_bytes=24 * GIB)
    assert limit.limit_bytes == 9 * GIB
    everything = MemoryLimit.of(None, kv_gib=float("inf"), idle_bytes=1 * GIB, machine_bytes=10 * GIB)
    assert everything.limit_bytes == 9 * GIB
    assert MemoryLimit.of(3.0, 2.0, 1 * GIB, 24 * GIB).limit_bytes == 3 * GIB


def test_the_error_names_the_memory_in_use_and_the_setting_that_raises_the_limit() -> None:
    limit = MemoryLimit(9 * GIB, 1 * GIB)
    assert limit.reached(9 * GIB) == ""
    said = limit.reached(10 * GIB)
    assert "had 10.0 GiB" in said and "may have 9.0 GiB" in said and "engine.memory_gib" in said
