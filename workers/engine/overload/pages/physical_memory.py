"""Physical memory in pages that can move from one address range to another without changing any address.

KV that grows takes over the pages of dropped parameters. No memory is freed and allocated in between, so that
growing cannot fail because of fragmentation or another allocation.
"""

from collections.abc import Sequence

from workers.engine.overload.pages.cpu_pages import CpuPageDriver, PageError
from workers.engine.overload.pages.cuda_pages import CudaPageDriver

PageDriver = CpuPageDriver | CudaPageDriver


class PhysicalMemory:
    """All pages of one engine, each of which is free or in one range."""

    def __init__(self, driver: PageDriver) -> None:
        self.driver, self.page_bytes = driver, driver.page_bytes
        self.free: list[int] = []
        self.ranges: list[MappedRange] = []

    def pages_of(self, nbytes: int) -> int:
        return -(-nbytes // self.page_bytes)

    def create(self, nbytes: int) -> None:
        """Create free pages for `nbytes` bytes: all of them, or none if that fails."""
        created: list[int] = []
        try:
            while len(created) < self.pages_of(nbytes):
                created.append(self.driver.create())
        except PageError:
            for handle in created:
                self.driver.destroy(handle)
            raise
        self.free += created

    def reserve(self, nbytes: int) -> "MappedRange":
        made = MappedRange(self, nbytes)
        self.ranges.append(made)
        return made

    def release(self, one: "MappedRange") -> None:
        """Free a range's pages and its address space. Its tensor must not be used afterwards."""
        one.resize(0)
        self.ranges.remove(one)
        self.driver.free(one.address, one.pages * self.page_bytes)

    def trim(self) -> None:
        """Return all free pages to the system."""
        while self.free:
            self.driver.destroy(self.free.pop())

    def take(self, count: int) -> Sequence[int]:
        """Take the `count` lowest free pages, so that neighbours stay together; raise if there are fewer."""
        if count > len(self.free):
            raise PageError(f"{count} pages are needed and {len(self.free)} are free")
        self.free.sort()
        taken, self.free = self.free[:count], self.free[count:]
        return taken


class MappedRange:
    """Reserved address space whose first pages have memory, and one tensor over all of it."""

    def __init__(self, memory: PhysicalMemory, nbytes: int) -> None:
        self._memory = memory
        self.pages = memory.pages_of(nbytes)
        self.address = memory.driver.reserve(self.pages * memory.page_bytes)
        self.tensor = memory.driver.tensor(self.address, nbytes)
        self.handles: list[int] = []  # of the mapped pages, in order

    @property
    def mapped_bytes(self) -> int:
        return len(self.handles) * self._memory.page_bytes

    def resize(self, nbytes: int, *, zero: bool = False) -> None:
        """Map memory to exactly the first `nbytes` bytes, rounded up to whole pages.

        Existing content stays. New memory has undefined content, unless `zero` is set.
        """
        memory, driver = self._memory, self._memory.driver
        needed, mapped = memory.pages_of(nbytes), len(self.handles)
        if needed > self.pages:
            raise PageError(f"{nbytes} bytes do not fit in a range of {self.pages} pages")
        if needed > mapped:
            at, taken = self.address + self.mapped_bytes, memory.take(needed - mapped)
            try:
                driver.map(at, taken)
            except PageError:
                memory.free += taken
                raise
            self.handles += taken
            if zero:
                driver.zero(at, len(taken) * memory.page_bytes)
        elif needed < mapped:
            driver.synchronize()
            driver.unmap(self.address + needed * memory.page_bytes, mapped - needed)
            memory.free += self.handles[needed:]
            del self.handles[needed:]
