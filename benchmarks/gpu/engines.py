"""Steps of `benchmarks.gpu` with engines: plain vLLM and ConServe, with a model of Qwen3 8B's sizes."""

import json
import os
import secrets
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import loads
from benchmarks.gpu.loads import EngineUnderTest, Load
from benchmarks.gpu.results import ResultLog
from benchmarks.gpu.sizes import LARGE, SMALL, EngineSizes
from benchmarks.gpu.step_clock import CLOCK_FILE, advertise, graph_modes
from benchmarks.harness.fleet import ROOT
from benchmarks.harness.vllm_engine import vllm_engine
from deploy.small_model import write_tokenizer
from kvtransfer.config import SECRET_VARIABLE, ConnectorConfig
from placement.scheduling.interface import ServingSettings, TurnTargets
from workers.engine.compat.cpu_build import fork_engine_on_cpu
from workers.engine.coserving.config import (
    PROMPT_SCHEDULER,
    SAFEPOINT_PLUGIN,
    SCHEDULER_CLASS,
    WORKER_CLASS,
    CoServingConfig,
)
from workers.processes import free_port

V1_RUNNER: Mapping[str, str] = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@dataclass(frozen=True)
class EngineVariant:
    """Options of an engine that is measured, and the loads that it plays."""

    loads: tuple[Load, ...] = ()
    coserves: bool = False
    keeps: bool = False  # whether it has what a decoder without co-serving has: host tier, prompt scheduler
    prefills: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)  # more options for vLLM
    environment: Mapping[str, str] = field(default_factory=lambda: V1_RUNNER)
    ttft_target_s: float | None = None


ANSWERS: tuple[Load, ...] = (loads.time_between_tokens, loads.time_to_first_token)
VARIANTS: dict[str, EngineVariant] = {
    "coserving": EngineVariant(
        (*ANSWERS, loads.beside_offline_decodes, loads.turns_beside_offline_work, loads.paper_load),
        coserves=True,
    ),
    "plain": EngineVariant((*ANSWERS, loads.beside_offline_decodes, loads.paper_load)),
    "kept": EngineVariant((*ANSWERS, loads.back_from_the_host), keeps=True),
    "aborts": EngineVariant(
        (loads.answers_beside_aborts,),
        coserves=True,
        environment={**V1_RUNNER, "VLLM_BATCH_INVARIANT": "1"},
        ttft_target_s=0.06,
    ),
    "plain-v2": EngineVariant(ANSWERS, environment={"VLLM_USE_V2_MODEL_RUNNER": "1"}),
}
HANDOVER = "handover"


async def measure_engine(name: str, device: str, log: ResultLog) -> None:
    """Play all loads of an engine variant, and log each load's figures when it is over."""
    with tempfile.TemporaryDirectory() as folder:
        made = RunFolder(Path(folder), device)
        if name == HANDOVER:
            await measure_handover(made, log)
            return
        variant = VARIANTS[name]
        async with started(name, variant, made, log) as engine:
            for load in variant.loads:
                log.add(await load(engine))
                log.add(graph_modes(engine.clock))


async def measure_handover(made: "RunFolder", log: ResultLog) -> None:
    """Measure prompts that one engine computes and another answers, with half of the GPU for each."""
    half = {"gpu_memory_utilization": 0.4} if made.device == "cuda" else {}
    async with (
        started("prefiller", EngineVariant(prefills=True, options=half), made, log) as prefills,
        started("decoder", EngineVariant(keeps=True, options=half), made, log) as decodes,
    ):
        log.add(await loads.handed_over(prefills, decodes, made.port))


class RunFolder:
    """Folder of one step, with the device, model, transfer port and secret that its engines share."""

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.device = path, device
        self.sizes = LARGE if device == "cuda" else SMALL
        self.model, self.plugin = path / "model", path / "plugin"
        self.port, self.secret = free_port("127.0.0.1"), secrets.token_hex(16)
        write_model(self.model, self.sizes)
        advertise(self.plugin)


def write_model(directory: Path, sizes: EngineSizes) -> None:
    """Write a model that vLLM fills with random weights: a configuration and a tokenizer."""
    directory.mkdir()
    config = {**sizes.model.hugging_face_config(), "vocab_size": sizes.vocabulary}
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory, sizes.model.max_context)


@asynccontextmanager
async def started(
    name: str, variant: EngineVariant, made: RunFolder, log: ResultLog
) -> AsyncIterator[EngineUnderTest]:
    """Start an engine, log how long that took, and stop it at the end."""
    began = time.monotonic()
    clock, iterations, plugin = made.path / f"{name}.clock", made.path / f"{name}.iterations", made.plugin
    sys.path.insert(0, str(plugin))  # an engine that is forked from this process inherits the patches
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(plugin), os.environ.get("PYTHONPATH", "")]),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        SECRET_VARIABLE: made.secret,
        CLOCK_FILE: str(clock),
        **variant.environment,
    }
    arguments = {
        "model": str(made.model),
        "load_format": "dummy",
        "kernel_config": {"enable_jit_warmup": False},  # it takes a minute; each step warms up by itself
        **made.sizes.arguments,
        **own_parts(name, variant, made, iterations),
        **variant.options,
    }
    if made.device == "cpu":
        fork_engine_on_cpu()  # as fleets do; otherwise two more processes import vLLM
    async with vllm_engine(arguments, environment) as engine:
        under = EngineUnderTest(
            engine.llm, engine.asked, sizes=made.sizes, clock=clock, iterations=iterations
        )
        await under.answers(1, 20)
        config = engine.llm.vllm_config
        log.add(
            {
                f"{name}_start_s": time.monotonic() - began,
                "async_scheduling": bool(config.scheduler_config.async_scheduling),
                "v2_runner": bool(config.use_v2_model_runner),
                "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            }
        )
        yield under


def own_parts(name: str, variant: EngineVariant, made: RunFolder, iterations: Path) -> dict[str, Any]:
    """Return vLLM's options for our connector, scheduler and worker; plain engines have none."""
    if not (variant.coserves or variant.keeps or variant.prefills):
        return {}
    serving = ServingSettings()
    if variant.ttft_target_s is not None:
        serving = replace(serving, slo=TurnTargets(ttft_s=variant.ttft_target_s))
    settings = CoServingConfig(serving, iteration_log=str(iterations))
    connector = ConnectorConfig(
        engine=name,
        epoch=1,
        control_socket=str(made.path / f"{name}.sock"),
        transfer=variant.prefills or variant.keeps,
        port=made.port if variant.prefills else 0,
        host_kv_gib=made.sizes.host_kv_gib if variant.keeps else 0.0,
        layer_hooks=variant.coserves or variant.prefills,
        plugins=(SAFEPOINT_PLUGIN,) if variant.coserves else (),
        safepoint=f"conserve-gpu-{uuid.uuid4().hex[:8]}" if variant.coserves else "",
    )
    options: dict[str, Any] = {
        "kv_transfer_config": connector.to_kv_transfer_config(),
        "additional_config": settings.to_additional_config(),
        "scheduler_cls": SCHEDULER_CLASS if variant.coserves else PROMPT_SCHEDULER,
    }
    if variant.coserves:
        options["worker_cls"] = WORKER_CLASS
    return options
