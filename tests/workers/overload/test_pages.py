"""Pages move between ranges while addresses stay; CUDA structures are compared with cuda.h."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from tests.workers.overload.resident import resident_bytes
from workers.engine.overload.pages import cuda_pages
from workers.engine.overload.pages.cpu_pages import CpuPageDriver, PageError
from workers.engine.overload.pages.physical_memory import PhysicalMemory

PAGE = 4096


@pytest.fixture
def memory() -> Iterator[PhysicalMemory]:
    memory = PhysicalMemory(CpuPageDriver(PAGE))
    yield memory
    for one in list(memory.ranges):
        memory.release(one)


def distinct(*handles: Sequence[int]) -> bool:
    together = [handle for some in handles for handle in some]
    return len(set(together)) == len(together)


def test_a_page_leaves_one_range_and_appears_in_another(memory: PhysicalMemory) -> None:
    gives, grows = memory.reserve(8 * PAGE), memory.reserve(64 * PAGE)
    memory.create(12 * PAGE)
    gives.resize(8 * PAGE)
    grows.resize(3 * PAGE + 1)
    grows.tensor[: 4 * PAGE] = 7
    at = grows.tensor.data_ptr()
    assert len(memory.free) == 0 and distinct(gives.handles, grows.handles)
    gives.resize(2 * PAGE)
    grows.resize(10 * PAGE, zero=True)
    assert grows.tensor.data_ptr() == at and int(grows.tensor[: 10 * PAGE].sum()) == 7 * 4 * PAGE
    assert (
        len(gives.handles) + len(grows.handles) == 12
        and not memory.free
        and distinct(gives.handles, grows.handles)
    )


def test_growing_beyond_the_free_pages_changes_nothing(memory: PhysicalMemory) -> None:
    one = memory.reserve(8 * PAGE)
    memory.create(4 * PAGE)
    with pytest.raises(PageError, match="5 pages are needed and 4 are free"):
        one.resize(5 * PAGE)
    with pytest.raises(PageError, match="in a range of 8 pages"):
        one.resize(9 * PAGE)
    assert (one.mapped_bytes, len(memory.free)) == (0, 4)


def in_a_process_of_its_own(text: str) -> "subprocess.CompletedProcess[str]":
    """Run Python code in a separate process, whose memory no other test changes."""
    environment = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, "-c", text]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=environment)


def test_pages_that_the_system_refuses_to_map_stay_free(memory: PhysicalMemory) -> None:
    one = memory.reserve(8 * PAGE)
    memory.create(8 * PAGE)
    memory.driver.free(one.address, 8 * PAGE)  # nothing is reserved there now, so it cannot be mapped
    with pytest.raises(PageError, match=r"mprotect: Cannot allocate memory .*vm\.max_map_count"):
        one.resize(4 * PAGE)
    assert (one.mapped_bytes, len(memory.free)) == (0, 8)
    memory.ranges.remove(one)


TOUCH = f"""
from workers.engine.overload.pages.cpu_pages import CpuPageDriver
from workers.engine.overload.pages.physical_memory import PhysicalMemory
memory = PhysicalMemory(CpuPageDriver({PAGE}))
one = memory.reserve(2 * {PAGE})
memory.create(2 * {PAGE})
one.resize(2 * {PAGE})
one.tensor.fill_(1)
one.resize({PAGE})
print(int(one.tensor[:{PAGE}].sum()), flush=True)
one.tensor.sum()
"""


def test_access_to_unmapped_pages_ends_the_process() -> None:
    run = in_a_process_of_its_own(TOUCH)
    assert run.stdout.split() == [str(PAGE)] and run.returncode == -signal.SIGSEGV


def test_released_ranges_return_their_memory_to_the_system() -> None:
    memory = PhysicalMemory(CpuPageDriver(PAGE))
    one = memory.reserve(16 * PAGE)
    memory.create(16 * PAGE)
    one.resize(16 * PAGE)
    one.tensor.fill_(1)
    assert resident_bytes(memory) == 16 * PAGE
    one.resize(4 * PAGE)
    assert resident_bytes(memory) == 4 * PAGE
    memory.release(one)
    assert len(memory.free) == 16
    memory.trim()
    assert not memory.free


def test_a_page_size_that_the_system_does_not_have_is_refused() -> None:
    with pytest.raises(PageError, match="not a multiple"):
        CpuPageDriver(1000)


def test_cuda_structures_have_the_layout_of_the_cuda_header() -> None:
    """The expected offsets are those of a C compiler for the structures in CUDA 12's cuda.h."""
    properties, access = cuda_pages.AllocationProperties, cuda_pages.AccessDescription
    offsets = [
        getattr(properties, name).offset for name in ("type", "handle_types", "location", "win32", "flags")
    ]
    assert (ctypes.sizeof(properties), offsets) == (32, [0, 4, 8, 16, 24])
    assert (ctypes.sizeof(access), access.flags.offset) == (12, 8)
