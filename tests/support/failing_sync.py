"""Disk whose `fsync` fails on demand: a library that is loaded before libc returns EIO."""

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = """
#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static int sync_unless_failing(long call, int file) {
    const char *flag = getenv("SYNC_FAILS_WHILE");
    if (flag && access(flag, F_OK) == 0) {
        errno = EIO;
        return -1;
    }
    return (int)syscall(call, file);
}

int fsync(int file) { return sync_unless_failing(SYS_fsync, file); }
int fdatasync(int file) { return sync_unless_failing(SYS_fdatasync, file); }
"""


class FailingSync:
    """Switch by which `fsync` fails in the processes that were started with its command prefix."""

    def __init__(self, folder: Path) -> None:
        if (compiler := shutil.which("cc")) is None:
            pytest.skip("no C compiler")
        library, self._flag = folder / "failing_sync.so", folder / "sync-fails"
        command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=_SOURCE.encode(), check=True, timeout=60)
        self.within = ["env", f"LD_PRELOAD={library}", f"SYNC_FAILS_WHILE={self._flag}"]
        """Command prefix of a process whose syncs can fail."""

    def fail(self) -> None:
        self._flag.touch()

    def work(self) -> None:
        self._flag.unlink()
