"""Record a fleet of one co-serving engine from start to end, on a machine with simulated GPUs.

The fleet starts once, serves turns and offline work, is traced and scraped, and ends. Several tests check the
record of this one run.
"""

import itertools
import json
import os
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI

from deploy.lifecycle.down import marked
from tests.deploy.observe.test_catalogue_is_complete import compared, expressions
from tests.fleet.talk import client, metric, opening
from tests.router.batch.jobs import jsonl
from tests.support.fleet import DOWN_LIMIT_S, RunningFleet, fleet_up
from tests.support.otlp_receiver import Received, Receiver, otlp_receiver
from tests.support.prometheus import PROMETHEUS, Prometheus
from tests.support.scraped_fleet import scraped
from tests.workers.power.machine import GpuMachine, build

CAP_W = 200
CLIENTS_TRACE, CLIENTS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MOVED = (  # counters of the engine that work() has to raise
    "conserve_coserving_online_tokens_total",
    "conserve_coserving_offline_tokens_total",
    "conserve_coserving_budget_tokens_total",
    "conserve_coserving_signals_total",
    "conserve_coserving_aborts_total",
    "conserve_coserving_abort_wait_seconds_count",
    "conserve_coserving_offline_tokens_lost_total",
    "conserve_coserving_late_tokens_total",
    "conserve_coserving_predicted_seconds_total",
)
TRIES, TURNS_A_TRY = 10, 4


@dataclass(frozen=True)
class WholeLife:
    answer: Any  # answer to the curl line that `conserve up` prints
    models: Any
    up_again: str
    engines: dict[str, dict[str, Any]]
    spans: list[Received]
    seen: dict[str, list[float]]  # values of every expression in Prometheus; empty without Prometheus
    saw_gpus: dict[str, bool]  # of keeper and engine: whether it loaded the library that simulates GPUs
    limits_w: list[float]
    down: str
    left: list[str]  # processes that survived the end of the fleet
    answers_still: bool
    limits_after_w: list[float]


def whole_life(folder: Path) -> WholeLife:
    machine = GpuMachine.of(build(folder / "nvml"), folder)
    with pytest.MonkeyPatch.context() as patched, machine.drawing(), otlp_receiver() as receiver:
        ambient = os.environ.get("LD_LIBRARY_PATH", "")
        for name, value in machine.variables.items():
            patched.setenv(name, value)

        def edit(content: Any) -> None:
            content["name"] = "one"
            content["tiers"][0] |= {"resources": {"GPU": 1, "decode_tier": 1}, "power_cap_w": CAP_W}
            # Only the keeper sees the simulated GPUs, because vLLM would try to use them.
            content["engine"]["env"] |= {"LD_LIBRARY_PATH": ambient, "STAND_IN_GPUS": ""}
            content["slos"] = {"default": {}, "impatient": {"ttfet": "20ms", "last_turn_tbt": "1ms"}}
            content["observe"] = {"tracing": {"endpoint": receiver.endpoint, "sample": 0.0}}

        with fleet_up("co-serving", edit) as fleet:
            seen = {}
            if PROMETHEUS:
                with scraped(fleet, folder) as running:
                    work(fleet)
                    seen = look(running)
            engines = fleet.engines()
            (engine,) = engines.values()
            saw_gpus = {
                "keeper": has(fleet.actor("KeeperActor"), machine.library),
                "engine": any(has(pid, machine.library) for pid in tree(engine["pid"])),
            }
            answer = ask_as_told(fleet)
            spans = ask_traced(fleet, receiver)
            again = fleet.cli("up", str(fleet.file), timeout_s=120).stdout
            limits_w, models = machine.limits(), get(fleet, "/v1/models")
            down = fleet.cli("down", fleet.fleet.name, timeout_s=DOWN_LIMIT_S).stdout
            left = [f"{process.pid} {process.name()}" for process in marked(fleet.home)]
            return WholeLife(
                answer,
                models,
                again,
                engines,
                spans,
                seen,
                saw_gpus,
                limits_w,
                down,
                left,
                answers(fleet),
                machine.limits(),
            )


def work(fleet: RunningFleet) -> None:
    """Send offline prompts, and turns that interrupt them, until each counter in MOVED has grown."""
    (engine,) = fleet.engines().values()
    page = f"http://{engine['http']}"
    sdk = client(fleet.url, "impatient").with_options(max_retries=5)
    conversations = itertools.count()
    for _ in range(TRIES):
        offline = metric(page, "conserve_coserving_offline_tokens_total")
        submit(sdk, fleet.model, next(conversations))
        fleet.until(
            lambda before=offline: metric(page, "conserve_coserving_offline_tokens_total") > before,
            60,
            "offline work to begin",
        )
        for _ in range(TURNS_A_TRY):
            ask_impatiently(sdk, fleet.model, next(conversations))
        if all(metric(page, name) > 0 for name in MOVED):
            return


def submit(sdk: OpenAI, model: str, seed: int) -> None:
    """Submit a batch of prompts that keep the engine busy for seconds."""
    lines = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": model, "messages": opening(1000 * seed + number, 300), "max_tokens": 8},
        }
        for number in range(12)
    ]
    file = sdk.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    sdk.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


def ask_impatiently(sdk: OpenAI, model: str, number: int) -> None:
    """Send a turn with SLO targets that no engine can meet."""
    sdk.chat.completions.create(
        model=model,
        messages=opening(number, 10),  # type: ignore[arg-type]
        max_tokens=4,
        extra_body={"slo_class": "impatient", "vllm_xargs": {"slo_ttft_ms": 20}},
        extra_headers={"X-Conversation-ID": f"impatient-{number}", "X-Conversation-Final": "1"},
    )


def look(running: Prometheus) -> dict[str, list[float]]:
    """Return the values of every expression, once Prometheus has scraped the work and the GPU power."""
    grew = (*MOVED, "conserve_energy_joules_total", "conserve_conversations_ended_total")
    running.until(lambda: all(running.ask(f"sum(rate({name}[1m])) > 0") for name in grew), "all to grow")
    time.sleep(1.5)  # one more scrape, for quotients of metrics of two processes
    return {compared(expression): running.numbers(compared(expression)) for _, expression in expressions()}


def has(pid: int, library: Path) -> bool:
    return str(library) in Path(f"/proc/{pid}/maps").read_text()


def tree(pid: int) -> list[int]:
    root = psutil.Process(pid)
    return [process.pid for process in (root, *root.children(recursive=True))]


def ask_as_told(fleet: RunningFleet) -> Any:
    curl = next(line for line in fleet.said.splitlines() if line.startswith("curl "))
    said = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(said.stdout)


def ask_traced(fleet: RunningFleet, receiver: Receiver) -> list[Received]:
    """Send a turn with a `traceparent`, and return the spans that arrived."""
    body = {"model": fleet.model, "prompt": "Hello", "max_tokens": 4, "stream": True}
    headers = {"content-type": "application/json", "traceparent": f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-01"}
    request = urllib.request.Request(f"{fleet.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")
    return receiver.until(lambda spans: {"turn", "llm_request"} <= {span.name for span in spans})


def get(fleet: RunningFleet, path: str) -> Any:
    with urllib.request.urlopen(f"{fleet.url}{path}", timeout=10) as answer:
        return json.load(answer)


def answers(fleet: RunningFleet) -> bool:
    try:
        get(fleet, "/health")
    except OSError:
        return False
    return True
