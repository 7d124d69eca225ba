"""Commands report errors in a sentence, find the fleet that the user means, and show its state."""

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import click
import psutil
import pytest
import typer

from deploy.cli.application import app
from deploy.cli.commands.up import wait_for_end
from deploy.cli.common import errors_as_sentences, only_fleet
from deploy.errors import DeployError
from deploy.home import FleetHome, RunRecord
from deploy.lifecycle.status import fleet_status
from deploy.ray.control import ControlError
from kvtransfer.config import ConnectorConfigError
from router.errors import GatewayConfigError
from tests.support.fleet import ROOT, conserve
from workers.keeper.engine_status import KeeperPhase, KeeperReport, KeeperStatus

pytestmark = pytest.mark.slow

OURS = RunRecord(pid=41, started=1.0, ray_address="127.0.0.1:1")
LAPTOP = ROOT / "configs" / "laptop.yaml"


@pytest.fixture
def base() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="conserve-"))  # a short path: sockets lie below it
    yield made
    shutil.rmtree(made, ignore_errors=True)


def leaves(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for inner, one in getattr(command, "commands", {}).items():
        yield from leaves(one, f"{name} {inner}")


COMMANDS = dict(leaves(typer.main.get_command(app), "conserve"))


def up(base: Path, name: str, record: RunRecord) -> FleetHome:
    """Write a fleet's run record, as `conserve up` does, and return the fleet's home."""
    home = FleetHome.of(name, str(base))
    home.create()
    home.ray_token()
    home.fleet_file.write_text(LAPTOP.read_text().replace("name: laptop", f"name: {name}"))
    home.write_run(record)
    return home


def alive() -> RunRecord:
    """Return a run record whose supervisor is this process, which is alive."""
    return replace(OURS, pid=os.getpid(), started=psutil.Process().create_time())


def test_conserve_check_accepts_a_valid_file(base: Path) -> None:
    answer = conserve(base, "check", "configs/laptop.yaml")
    assert answer.returncode == 0
    assert "valid: fleet 'laptop', model smollm2, 1 x prefill (prefill), 2 x decode (decode)" in answer.stdout


def test_conserve_check_reports_a_mistake_with_its_line_and_without_a_traceback(base: Path) -> None:
    file = base / "wrong.yaml"
    file.write_text(LAPTOP.read_text().replace("replicas: 2", "replcas: 2"))
    for command in ("check", "up"):
        answer = conserve(base, command, str(file))
        assert answer.returncode == 1
        assert "did you mean 'replicas'?" in answer.stderr
        assert str(file) in answer.stderr
        assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("error", [ConnectorConfigError, GatewayConfigError])
def test_an_error_of_a_component_is_printed_as_a_sentence(
    error: type, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit), errors_as_sentences():
        raise error("that cannot be")
    assert capsys.readouterr().err == "conserve: that cannot be\n"


@pytest.mark.parametrize(
    ("file", "advised"),
    [("hf/hub/model", True), ("", True), (None, True), ("tls.key", False)],
    ids=["below a folder", "above one", "no file", "elsewhere"],
)
def test_a_file_error_names_the_variables_of_conserves_folders_unless_the_file_is_elsewhere(
    file: str | None,
    advised: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    name, number = (None, errno.ENOSPC) if file is None else (str(tmp_path / file), errno.EACCES)
    with pytest.raises(SystemExit), errors_as_sentences():
        raise OSError(number, os.strerror(number), name)
    said = capsys.readouterr().err
    assert os.strerror(number) in said and ("HF_HOME" in said) is advised


def test_conserve_status_asks_all_keepers_at_the_same_time(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = up(base, "laptop", alive())
    names = ("prefill-0", "decode-0", "decode-1")
    for name in names:
        home.engine(name).mkdir(parents=True)
        (home.engine(name) / "control").write_text(name)
    all_asked = asyncio.Barrier(len(names))

    class AskedKeeper:
        def __init__(self, control: str, *given: object) -> None:
            self._control = control

        async def __aenter__(self) -> "AskedKeeper":
            return self

        async def __aexit__(self, *error: object) -> None:
            pass

        async def info(self) -> KeeperReport:
            await asyncio.wait_for(all_asked.wait(), 5)
            if self._control == "decode-1":
                raise ControlError("gone")
            return KeeperReport(KeeperStatus(self._control, KeeperPhase.SERVING), None, None)

    monkeypatch.setattr("deploy.lifecycle.status.ControlClient", AskedKeeper)
    found = {engine.engine: engine.phase for engine in fleet_status(home).engines}
    assert found == {"prefill-0": "serving", "decode-0": "serving", "decode-1": "not started yet"}


def test_commands_say_that_their_fleet_is_not_up(base: Path) -> None:
    answer = conserve(base, "status", "laptop")
    assert (answer.returncode, answer.stderr.strip()) == (
        1,
        "conserve: fleet 'laptop' is not up; start it with: conserve up FILE",
    )
    assert "nothing was up" in conserve(base, "down", "laptop").stdout
    assert "no engine 'decode-0'" in conserve(base, "logs", "decode-0", "--fleet", "laptop").stderr


def test_a_command_without_a_name_takes_the_only_running_fleet(base: Path) -> None:
    for command in ("status", "down", "advise", "top"):
        said = conserve(base, command).stderr
        assert said.startswith("conserve: no fleet is up on this machine; start one with: conserve serve")
    up(base, "one", alive())
    assert conserve(base, "status").stdout.startswith("one ")
    up(base, "two", alive())
    assert conserve(base, "status").stderr == "conserve: several fleets are up: one, two; say which\n"
    assert conserve(base, "status", "two").stdout.startswith("two ")


def test_a_command_without_a_name_ignores_killed_fleets_while_one_runs(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONSERVE_HOME", str(base))
    up(base, "killed", OURS)
    assert only_fleet().name == "killed"
    up(base, "too", OURS)
    with pytest.raises(DeployError, match=r"no fleet is up, and others were .*: killed, too; say which"):
        only_fleet()
    up(base, "one", alive())
    assert only_fleet().name == "one"
    with pytest.raises(DeployError, match=r"1 fleet is up, and others were .*: killed, one, too; say which"):
        only_fleet(to_end=True)
    assert "1 fleet is up" in conserve(base, "down").stderr, "what serves is not ended for want of a name"
    up(base, "two", alive())
    with pytest.raises(DeployError, match="several fleets are up: one, two; say which"):
        only_fleet()


def test_a_folder_that_cannot_be_written_gives_an_error_with_its_name_and_no_traceback(base: Path) -> None:
    (base / "file").write_text("")
    answer = conserve(base / "file", "serve", "smollm2", "--prefill", "0", "--decode", "1")
    assert answer.returncode == 1 and answer.stderr.startswith(
        f"conserve: {base}/file/serve: Not a directory"
    )
    assert "CONSERVE_HOME" in answer.stderr and "Traceback" not in answer.stderr


def test_conserve_status_reports_a_starting_fleet_as_starting(base: Path) -> None:
    up(base, "one", alive())
    said = conserve(base, "status").stdout
    assert "0 of 3 engines serve; the endpoint is open when all do" in said
    assert "directory" not in said
    assert "still starting: see conserve status one" in conserve(base, "top").stderr


def test_conserve_status_says_that_a_fleet_has_no_supervisor(base: Path) -> None:
    up(base, "one", OURS)
    assert "Its supervisor is gone" in conserve(base, "status").stdout


def test_the_help_of_conserve_names_every_command(base: Path) -> None:
    text = conserve(base, "--help").stdout
    for name in (name.split()[1] for name in COMMANDS if name != "conserve"):
        assert f" {name} " in text, name
    assert "--install-completion" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_sentence_of_help(name: str) -> None:
    said = (COMMANDS[name].help or "").strip()
    assert said.endswith(".") and len(said.split()) > 3


def ends_after(change: Callable[[], object], home: FleetHome) -> bool:
    waiting = threading.Thread(target=wait_for_end, args=(home, 0.01), daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    change()
    waiting.join(0.5)
    return not waiting.is_alive()


def test_conserve_up_ends_when_another_command_brings_the_fleet_down(base: Path) -> None:
    home = up(base, "one", OURS)
    assert ends_after(home.run_file.unlink, home)


def test_conserve_up_ends_when_another_run_of_the_fleet_has_begun(base: Path) -> None:
    home = up(base, "one", OURS)
    assert ends_after(lambda: home.write_run(replace(OURS, pid=42, started=2.0)), home)


def test_an_upgrade_does_not_end_conserve_up(base: Path) -> None:
    home = up(base, "one", OURS)
    assert not ends_after(lambda: home.write_run(replace(OURS, endpoint="http://127.0.0.1:8001")), home)


def test_only_the_batch_command_imports_the_openai_client() -> None:
    """Importing `openai` takes longer than all the work of `conserve check`."""
    code = "import sys, deploy.cli.application; sys.exit('openai' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60).returncode == 0
