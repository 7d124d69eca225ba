"""Small disk that can really be full: a tmpfs that only processes started with its prefix see."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_HOLD = 'mount -t tmpfs -o size="$1"k none "$0" && echo mounted && exec sleep 600'


class SmallDisk:
    """Small file system that is mounted at a folder, and outlives the processes that use it."""

    def __init__(self, folder: Path, pid: int, within: list[str]) -> None:
        self.within = within
        """Command prefix that runs a process where the disk is mounted."""
        self._filler = Path(f"/proc/{pid}/root{folder}/filler")

    def fill(self) -> None:
        """Fill the disk until no byte is free."""
        with suppress(OSError), self._filler.open("ab", buffering=0) as opened:
            while opened.write(bytes(4096)):
                pass

    def make_room(self) -> None:
        self._filler.unlink()


@contextmanager
def small_disk(folder: Path, kib: int = 1024) -> Iterator[SmallDisk]:
    """Mount a small disk at `folder`, or skip the test if this machine does not allow mounts."""
    for user in ([], ["--user", "--map-root-user"]):
        command = ["unshare", *user, "--mount", "sh", "-c", _HOLD, str(folder), str(kib)]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            assert holder.stdout is not None
            if holder.stdout.readline():
                enter = ["--user", "--preserve-credentials"] if user else []
                target = ["nsenter", "--target", str(holder.pid), *enter, "--mount", f"--wd={os.getcwd()}"]
                yield SmallDisk(folder, holder.pid, target)
                return
        finally:
            holder.kill()
            holder.communicate()
    pytest.skip("this machine lets us mount nothing")
