"""Pages that pass from range to range, on the CPU's driver: addresses stay, a fault changes nothing, and what
is not mapped cannot be touched. Layouts for CUDA's driver are held to what cuda.h has."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from workers.overload import cuda_pages
from workers.overload.memfd import MOST_PAGES, SMALLEST_PAGE, MemfdDriver, page_for
from workers.overload.pages import PageError, PhysicalMemory

PAGE = 4096
AREAS = int(Path("/proc/sys/vm/max_map_count").read_text())


@pytest.fixture
def memory() -> Iterator[PhysicalMemory]:
    memory = PhysicalMemory(MemfdDriver(PAGE))
    yield memory
    memory.close()


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
    assert memory.free_pages == 0 and distinct(gives.handles, grows.handles)
    gives.resize(2 * PAGE)
    grows.resize(10 * PAGE, zero=True)
    assert grows.tensor.data_ptr() == at and int(grows.tensor[: 10 * PAGE].sum()) == 7 * 4 * PAGE
    assert (memory.pages, memory.free_pages) == (12, 0) and distinct(gives.handles, grows.handles)


def test_more_than_there_is_changes_nothing(memory: PhysicalMemory) -> None:
    one = memory.reserve(8 * PAGE)
    memory.create(4 * PAGE)
    with pytest.raises(PageError, match="5 pages are wanted, and 4 of 4 are free"):
        one.resize(5 * PAGE)
    with pytest.raises(PageError, match="in a range of 8 pages"):
        one.resize(9 * PAGE)
    assert (one.mapped_bytes, memory.free_pages) == (0, 4)


REFUSED = f"""
from workers.overload.pages import PageError
from workers.overload.memfd import MemfdDriver
driver, count = MemfdDriver({PAGE}), {AREAS} + 1_000
handles = [driver.create() for _ in range(count)]
address = driver.reserve(count * {PAGE})
try:
    driver.map(address, handles[::-1])  # neighbours would be one area
except PageError as error:
    print(error)
driver.map(address, handles[: {AREAS} // 2 : -1])
tensor = driver.tensor(address, {PAGE})
tensor.fill_(5)
print(driver.used_bytes(), int(tensor.sum()))
driver.unmap(address, count)
driver.free(address, count * {PAGE})
driver.close()
"""


def in_a_process_of_its_own(text: str) -> "subprocess.CompletedProcess[str]":
    """What it does with its memory is nobody else's."""
    environment = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, "-c", text]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.skipif(AREAS > 100_000, reason="this system lets a process have very many areas")
def test_what_the_system_refuses_halfway_is_undone() -> None:
    run = in_a_process_of_its_own(REFUSED)
    assert run.returncode == 0, run.stderr
    refused, found = run.stdout.splitlines()
    assert "Cannot allocate memory" in refused and "vm.max_map_count" in refused
    assert found == f"{PAGE} {5 * PAGE}"


TOUCH = f"""
from workers.overload.memfd import MemfdDriver
from workers.overload.pages import PhysicalMemory
memory = PhysicalMemory(MemfdDriver({PAGE}))
one = memory.reserve(2 * {PAGE})
memory.create(2 * {PAGE})
one.resize(2 * {PAGE})
one.tensor.fill_(1)
one.resize({PAGE})
print(int(one.tensor[:{PAGE}].sum()), flush=True)
one.tensor.sum()
"""


def test_what_is_not_mapped_cannot_be_touched() -> None:
    run = in_a_process_of_its_own(TOUCH)
    assert run.stdout.split() == [str(PAGE)] and run.returncode == -signal.SIGSEGV


def test_memory_is_the_systems_again_when_all_is_closed() -> None:
    driver = MemfdDriver(PAGE)
    memory = PhysicalMemory(driver)
    one = memory.reserve(16 * PAGE)
    memory.create(16 * PAGE)
    one.resize(16 * PAGE)
    one.tensor.fill_(1)
    assert driver.used_bytes() == 16 * PAGE
    memory.release(one)
    for handle in memory.take(16):
        driver.destroy(handle)
    assert driver.used_bytes() == 0 and driver.create() < 16, "a place is used again"


def test_so_much_memory_has_not_too_many_pages() -> None:
    assert page_for(1) == SMALLEST_PAGE and page_for(MOST_PAGES * SMALLEST_PAGE) == SMALLEST_PAGE
    assert page_for(MOST_PAGES * SMALLEST_PAGE + 1) == 2 * SMALLEST_PAGE
    with pytest.raises(PageError, match="no multiple"):
        MemfdDriver(1000)


def test_cudas_layouts_are_those_of_its_header() -> None:
    """As a C compiler has them with CUDA 12's cuda.h."""
    properties, access = cuda_pages.AllocationProperties, cuda_pages.AccessDescription
    offsets = [
        getattr(properties, name).offset for name in ("type", "handle_types", "location", "win32", "flags")
    ]
    assert (ctypes.sizeof(properties), offsets) == (32, [0, 4, 8, 16, 24])
    assert (ctypes.sizeof(access), access.flags.offset) == (12, 8)
