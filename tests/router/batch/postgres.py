"""Runs a private PostgreSQL for the tests, on a Unix socket and without a password."""

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_START_S = 30.0


class Absent(Exception):
    """PostgreSQL is not available on this machine; the text says why."""


@contextmanager
def private_server() -> Iterator[str]:
    """Run PostgreSQL, and yield the folder that contains its Unix socket."""
    bin_dir = _binaries()
    user = _unprivileged()
    folder = Path(tempfile.mkdtemp(prefix="conserve-pg-"))
    server: subprocess.Popen[bytes] | None = None
    try:
        if user is not None:
            entry = pwd.getpwnam(user)
            os.chown(folder, entry.pw_uid, entry.pw_gid)
        data = folder / "data"
        subprocess.run(
            [bin_dir / "initdb", "-D", data, "-U", "conserve", "-A", "trust", "--no-sync", "-E", "UTF8"],
            user=user,
            check=True,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=120,
        )
        log = folder / "log"
        options = ["-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"]
        with log.open("wb") as output:
            server = subprocess.Popen(
                [bin_dir / "postgres", "-D", data, *options],
                user=user,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        until = time.monotonic() + _START_S
        ready = [bin_dir / "pg_isready", "-q", "-h", folder]
        while subprocess.run(ready, check=False, timeout=30).returncode != 0:
            if server.poll() is not None or time.monotonic() > until:
                raise Absent(f"PostgreSQL does not start here: {log.read_text()[-300:]}")
            time.sleep(0.05)
        yield str(folder)
    finally:
        if server is not None:
            server.terminate()
            server.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def _binaries() -> Path:
    found = shutil.which("postgres")
    candidates = [Path(found).resolve().parent] if found else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for candidate in candidates:
        if (candidate / "initdb").exists() and (candidate / "postgres").exists():
            return candidate
    raise Absent("PostgreSQL is not installed (Debian package postgresql): deploy/setup/packages.sh")


def _unprivileged() -> str | None:
    """Switch to another user, because PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            pwd.getpwnam(name)
        except KeyError:
            continue
        return name
    raise Absent("running as root, and there is no unprivileged user to run PostgreSQL as")
