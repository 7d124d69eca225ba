"""However a fleet ends (Ctrl-C, down, a start that fails, a killed terminal), no process of it is left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.home import FleetHome
from deploy.lifecycle.down import marked
from tests.support.fleet import ROOT, conserve, environment
from tests.support.otlp_receiver import Receiver, otlp_receiver
from workers.ports import free_port

pytestmark = pytest.mark.fleet

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


class Rig:
    def __init__(self, base: Path) -> None:
        self.base = base
        self.port = free_port("127.0.0.1")
        self.home = FleetHome.of("one", str(base))
        self.running: subprocess.Popen[str] | None = None

    def file(self, extra: str = "max-num-seqs: 4", more: str = "") -> Path:
        file = self.base / "one.yaml"
        file.write_text(ONE_ENGINE.format(extra=extra, port=self.port) + more)
        return file

    def up(self) -> "subprocess.Popen[str]":
        """In the foreground, in a session of its own as in a terminal."""
        with (self.base / "up.out").open("w") as output:
            self.running = subprocess.Popen(
                [sys.executable, "-m", "deploy.cli", "up", str(self.file())],
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
        return [f"{process.pid} {process.name()}" for process in marked(self.home)]


@pytest.fixture
def rig() -> Iterator[Rig]:
    base = Path(tempfile.mkdtemp(prefix="conserve-"))
    rig = Rig(base)
    yield rig
    if rig.running is not None:
        rig.running.kill()
        rig.running.wait()
    conserve(base, "down", "one", timeout_s=120)
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with otlp_receiver() as received:
        yield received


def until(true: Callable[[], object], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s for {what}"
        time.sleep(0.3)


@pytest.mark.timeout(600)
def test_a_start_that_fails_says_why_and_leaves_nothing(rig: Rig) -> None:
    answer = conserve(rig.base, "up", str(rig.file("max-numb-seqs: 4")), timeout_s=500)
    assert answer.returncode == 1
    assert "engine mixed-0 cannot start: wrong argument: " in answer.stderr
    assert "unrecognized arguments: --max-numb-seqs" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert rig.processes() == []


@pytest.mark.timeout(600)
def test_ctrl_c_while_engines_start_leaves_nothing(rig: Rig) -> None:
    running = rig.up()
    until(lambda: "mixed-0: starting" in rig.output(), 300, "the engine to begin to start")
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(90) == 130
    assert "everything is down again" in rig.output()
    assert rig.processes() == []


def ask_traced(port: int, receiver: Receiver) -> None:
    """A turn of a client that traces: the gateway's spans, and vLLM's own below the leg that it served."""
    body = {"model": "small", "prompt": "Hello", "max_tokens": 4, "stream": True}
    client, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"content-type": "application/json", "traceparent": f"00-{client}-{parent}-01"}
    url = f"http://127.0.0.1:{port}/v1/completions"
    with urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120
    ) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")
    spans = receiver.until(lambda spans: {"turn", "llm_request"} <= {span.name for span in spans})
    found = {span.name: span for span in spans}
    assert set(found) == {"turn", "identify", "bind", "decode leg", "llm_request"}
    assert {span.trace for span in spans} == {client} and found["turn"].parent == parent
    assert found["llm_request"].parent == found["decode leg"].span
    assert found["llm_request"].service == "conserve-mixed-0"


@pytest.mark.timeout(900)
def test_it_serves_and_traces_and_down_leaves_nothing(rig: Rig, receiver: Receiver) -> None:
    file = rig.file(more=f"observe: {{tracing: {{endpoint: '{receiver.endpoint}', sample: 0.0}}}}\n")
    answer = conserve(rig.base, "up", str(file), "--detach", timeout_s=700)
    assert answer.returncode == 0, answer.stderr
    curl = next(line for line in answer.stdout.splitlines() if line.startswith("curl "))
    said = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(said.stdout)["choices"][0]["message"]["content"]
    with urllib.request.urlopen(f"http://127.0.0.1:{rig.port}/v1/models", timeout=10) as models:
        assert json.load(models)["data"][0]["id"] == "small"

    ask_traced(rig.port, receiver)

    again = conserve(rig.base, "up", str(file))
    assert "fleet 'one' is up as the file says; to end it: conserve down one" in again.stdout
    status = json.loads(conserve(rig.base, "status", "one", "--json").stdout)
    assert [(engine["engine"], engine["phase"]) for engine in status["engines"]] == [("mixed-0", "serving")]

    down = conserve(rig.base, "down", "one", timeout_s=120)
    assert "processes ended" in down.stdout
    assert rig.processes() == []
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{rig.port}/health", timeout=2)


@pytest.mark.timeout(900)
def test_a_killed_terminal_leaves_nothing_after_the_lease(rig: Rig) -> None:
    running = rig.up()
    until(lambda: "mixed-0: starting" in rig.output(), 300, "the engine to begin to start")
    running.kill()
    running.wait()
    until(lambda: not rig.processes(), 120, "everything to end by itself")
