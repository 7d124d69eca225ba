"""Ctrl-C, `conserve down`, a failed start and a killed terminal leave no process of a fleet."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from deploy.home import FleetHome
from deploy.lifecycle.down import marked
from deploy.small_model import make_model
from tests.support.fleet import ROOT, conserve, environment
from workers.processes import free_port

pytestmark = pytest.mark.engine  # beside the tests of the shared fleet, which take longer than all engines
DOWN_S = 15.0  # a whole `conserve down`, on two cores

ONE_ENGINE = """\
name: one
policy: collocated
model: {{path: small, dtype: float32, max_context: 4096}}
engine:
  device: cpu
  threads: 1
  lease: 10s
  env: {{VLLM_CPU_KVCACHE_SPACE: "1"}}
  args: {{num-gpu-blocks-override: 256, block-size: 32, enforce-eager: true, {extra}}}
tiers: [{{name: mixed, role: mixed, resources: {{mixed_tier: 1}}}}]
gateway: {{port: {port}}}
kv: {{host_kv_gib: 0}}
"""


class FleetRig:
    def __init__(self, base: Path) -> None:
        self.base = base
        self.port = free_port("127.0.0.1")
        self.home = FleetHome.of("one", str(base))
        self.running: subprocess.Popen[str] | None = None

    def file(self, extra: str = "max-num-seqs: 4") -> Path:
        file = self.base / "one.yaml"
        file.write_text(ONE_ENGINE.format(extra=extra, port=self.port))
        return file

    def up(self, *, background: bool = False) -> "subprocess.Popen[str]":
        return self.start("up", str(self.file()), background=background)

    def start(self, *arguments: str, background: bool = False) -> "subprocess.Popen[str]":
        """Start `conserve`: in the foreground of a new session, as in a terminal, or in a script's
        background, where SIGINT is ignored."""
        command = [sys.executable, "-m", "deploy.cli", *arguments]
        if background:
            command = ["sh", "-c", f"{shlex.join(command)} & wait"]
        with (self.base / "up.out").open("w") as output:
            self.running = subprocess.Popen(
                command,
                env=environment(self.base),
                cwd=ROOT,
                stdout=output,
                stderr=output,
                start_new_session=True,
                text=True,
            )
        return self.running

    def output(self) -> str:
        return (self.base / "up.out").read_text()

    def processes(self) -> list[str]:
        return [str(process) for process in marked(self.home)]  # one may end meanwhile


@pytest.fixture
def rig() -> Iterator[FleetRig]:
    base = Path(tempfile.mkdtemp(prefix="conserve-"))
    rig = FleetRig(base)
    yield rig
    if rig.running is not None:
        rig.running.kill()
        rig.running.wait()
    conserve(base, "down", "one", timeout_s=120)
    shutil.rmtree(base, ignore_errors=True)


def until(true: Callable[[], object], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s for {what}"
        time.sleep(0.3)


@pytest.mark.timeout(600)
def test_a_failed_start_reports_its_reason_and_leaves_no_process(rig: FleetRig) -> None:
    # `conserve check` knows vLLM's options, and not what each takes.
    answer = conserve(rig.base, "up", str(rig.file("compilation-config: none-such")), timeout_s=500)
    assert answer.returncode == 1
    assert "engine mixed-0 cannot start: wrong argument: " in answer.stderr
    assert "compilation-config" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert rig.processes() == []


@pytest.mark.timeout(600)
def test_ctrl_c_while_engines_start_leaves_no_process(rig: FleetRig) -> None:
    running = rig.up()
    until(lambda: "mixed-0: starting" in rig.output(), 300, "the engine to begin to start")
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(90) == 130
    assert "everything is down again" in rig.output()
    assert rig.processes() == []


@pytest.mark.timeout(600)
def test_serve_starts_a_fleet_for_a_model_directory_and_ctrl_c_ends_it_within_seconds(rig: FleetRig) -> None:
    make_model(rig.base / "one")
    one_engine = ("--prefill", "0", "--decode", "1", "--max-model-len", "4096")
    serve = ("serve", str(rig.base / "one"), *one_engine, "--port", str(rig.port))
    running = rig.start(*serve, "--", "--max-num-seqs", "4")
    until(lambda: "Ctrl-C ends it" in rig.output(), 300, "the fleet to serve")
    again = conserve(rig.base, *serve, "--detach", "--", "--max-num-seqs", "4", timeout_s=120)
    assert "fleet 'one' is up as the file says" in again.stdout, again.stderr
    sdk = OpenAI(base_url=f"http://127.0.0.1:{rig.port}/v1", api_key="any", max_retries=0)
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    said = sdk.chat.completions.create(model="one", messages=messages, max_tokens=8)
    assert said.usage is not None and said.usage.completion_tokens > 0
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(DOWN_S) == 0
    assert rig.processes() == []


@pytest.mark.timeout(600)
def test_conserve_down_during_a_start_also_ends_the_waiting_conserve_up(rig: FleetRig) -> None:
    running = rig.up()
    until(lambda: "mixed-0: starting" in rig.output(), 300, "the engine to begin to start")
    assert "processes ended" in conserve(rig.base, "down", "one", timeout_s=120).stdout
    assert running.wait(60) == 1
    assert "the fleet was ended from elsewhere while it started" in rig.output()
    assert "Traceback" not in rig.output()
    assert rig.processes() == []


@pytest.mark.timeout(600)
def test_a_script_ends_a_fleet_that_it_started_in_the_background_within_seconds(rig: FleetRig) -> None:
    """Before the fleet is up, `conserve status` shows the progress of the start."""
    running = rig.up(background=True)
    said = ""
    while "mixed-0" not in said or "starting" not in said:
        assert "Ctrl-C ends it" not in rig.output(), "the fleet serves, and no status showed its start"
        said = conserve(rig.base, "status").stdout
    assert "0 of 1 engines serve" in said
    until(lambda: "Ctrl-C ends it" in rig.output(), 300, "the fleet to serve")
    assert "0 of 1 engines serve" not in conserve(rig.base, "status").stdout
    (engine,) = json.loads(conserve(rig.base, "status", "--json").stdout)["engines"]
    assert (engine["engine"], engine["phase"]) == ("mixed-0", "serving")
    began = time.monotonic()
    assert "processes ended" in conserve(rig.base, "down").stdout
    assert time.monotonic() - began < DOWN_S
    assert running.wait(5) == 0
    assert rig.processes() == []


@pytest.mark.timeout(900)
def test_no_process_outlives_a_killed_terminal_by_more_than_the_lease(rig: FleetRig) -> None:
    running = rig.up()
    until(lambda: "mixed-0: starting" in rig.output(), 300, "the engine to begin to start")
    running.kill()
    running.wait()
    until(lambda: not rig.processes(), 120, "everything to end by itself")
