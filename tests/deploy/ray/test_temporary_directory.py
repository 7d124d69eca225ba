"""Ray's temporary folder is accessible to its user only, and is removed with the fleet."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.errors import LifecycleError
from deploy.home import LONGEST_SOCKET_PATH, FleetHome, RunRecord
from deploy.lifecycle.down import bring_down
from deploy.ray.cluster import (
    LONGEST_SOCKET,
    make_temporary_directory,
    temporary_directory,
)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetHome]:
    base = tempfile.mkdtemp(prefix="t")
    monkeypatch.setattr(tempfile, "tempdir", base)
    home = FleetHome(Path(base) / "one")
    home.create()
    yield home
    shutil.rmtree(base)


def test_only_the_user_can_enter_rays_directory_whatever_mode_ray_sets(home: FleetHome) -> None:
    made = temporary_directory(home)
    made.parent.mkdir()
    made.parent.chmod(0o777)  # as another version of ours, or an odd umask, left it
    make_temporary_directory(home)
    assert made.is_dir() and made.parent.stat().st_mode & 0o777 == 0o700
    made.chmod(0o777)  # as Ray does
    assert made.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_temporary_directory_of_another_user_is_refused(home: FleetHome) -> None:
    private = temporary_directory(home).parent
    private.mkdir()
    os.chown(private, 65534, 65534)
    with pytest.raises(LifecycleError, match=r"is another user's.*set TMPDIR"):
        make_temporary_directory(home)


def test_a_symbolic_link_as_temporary_directory_is_refused(home: FleetHome, tmp_path: Path) -> None:
    private = temporary_directory(home).parent
    private.symlink_to(tmp_path)
    with pytest.raises(LifecycleError, match="is another user's"):
        make_temporary_directory(home)
    private.unlink()


def test_rays_longest_socket_path_fits_into_the_kernels_limit(
    home: FleetHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setattr(os, "getuid", lambda: 4_294_967_294)
    assert len(str(temporary_directory(home) / LONGEST_SOCKET)) <= LONGEST_SOCKET_PATH
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 30)
    with pytest.raises(LifecycleError, match="too long for Ray's sockets"):
        make_temporary_directory(home)


@pytest.mark.parametrize("endpoint", ["", "http://127.0.0.1:1"], ids=["while it started", "while it served"])
def test_down_leaves_only_the_ray_logs_of_a_failed_start(home: FleetHome, endpoint: str) -> None:
    make_temporary_directory(home)
    logs = temporary_directory(home) / "session_1" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.err").write_text("why")
    (temporary_directory(home) / "session_latest").symlink_to(logs.parent)
    gone = RunRecord(2**22, 0.0, "127.0.0.1:1", endpoint=endpoint)
    home.write_run(gone)
    bring_down(home)
    assert not temporary_directory(home).parent.exists()
    kept = home.ray / "logs" / "worker-1.err"
    assert kept.exists() is (not endpoint)
