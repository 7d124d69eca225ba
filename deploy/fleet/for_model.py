"""The fleet file for one model on one machine, which `conserve serve` runs.

The functions do no I/O: they compute the file's content from facts of the model and of the machine.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from deploy.errors import DeployError
from deploy.fleet.engine_checks import FILL, speculates
from deploy.fleet.model_architecture import BYTES, Architecture
from deploy.fleet.schema import default
from placement.routing.placer_settings import PlacerSettings
from placement.sizing.accelerators import ACCELERATORS, Accelerator
from placement.sizing.provisioning import TYPICAL, Capacity, Means, ProvisioningError, provision

GIB = 1 << 30
GPU_SHARE = 0.9  # share of a GPU's memory for weights and KV
GPU_WORKSPACE = 2 * GIB  # activations and CUDA graphs
WEIGHTS_SHARE = 0.7  # most of that memory that weights may take, so that enough is left for KV
CPU_SHARE = 0.8  # share of the free memory that engines may use
CPU_WORKSPACE = 1.5 * GIB  # memory of an engine beside weights and KV
CPU_KV = 1.1 * GIB  # KV of an engine, or more if --max-model-len needs it
LEAST_CONTEXT = 2_048
CPU_BLOCK = 32
HEADROOM = default(PlacerSettings, "headroom_tokens") + 2 * CPU_BLOCK  # tokens beside a prompt, and rounding
REACHED = 0.5  # share of a data sheet's figures that engines reach


@dataclass(frozen=True, slots=True)
class Machine:
    cores: int
    memory: int  # bytes that are free
    gpu_memory: tuple[int, ...] = ()  # bytes of each GPU
    accelerator: str | None = None  # a name of `placement/sizing/accelerators.py`
    takes_caps: bool = True  # power limits of the GPUs can be set


@dataclass(frozen=True, slots=True)
class Wishes:
    """Options that the user gave; all other settings follow from the model and the machine."""

    model: str
    prefill: int | None = None
    decode: int | None = None
    power_cap_w: int | None = None
    coserving: bool | None = None  # None: where each engine prefills and decodes
    port: int | None = None
    host: str | None = None
    dtype: str = "auto"
    max_context: int | None = None
    served_name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # vLLM's


@dataclass(frozen=True, slots=True)
class _Engines:
    prefill: int
    decode: int
    context: int

    @property
    def collocated(self) -> bool:
        return not self.prefill


def fleet_for(wishes: Wishes, model: Architecture, machine: Machine) -> dict[str, Any]:
    on_gpus = bool(machine.gpu_memory)
    engine, engines = (_on_gpus if on_gpus else _on_cpu)(wishes, model, machine)
    content: dict[str, Any] = {"name": fleet_name(wishes.model)}
    if engines.collocated:
        content["policy"] = "collocated"
    content["model"] = {"path": wishes.model, "dtype": wishes.dtype, "max_context": engines.context}
    if wishes.served_name:
        content["model"]["served_name"] = wishes.served_name
    content["engine"] = engine
    content["tiers"] = [
        _tier(role, replicas, wishes, machine)
        for role, replicas in (("prefill", engines.prefill), ("decode", engines.decode))
        if replicas
    ]
    content["gateway"] = {"host": wishes.host or "127.0.0.1", "port": wishes.port or 8000}
    content["conversation"] = {"ttl": "30m", "park_after": "60s"}
    content["kv"] = {"host_kv_gib": 4 if on_gpus else 1}
    coserves = engines.collocated if wishes.coserving is None else wishes.coserving
    if coserves:
        content["coserving"] = {"enabled": True, "ageing": "1m"}
    return content


def fleet_name(model: str) -> str:
    last = model.rstrip("/").rsplit("/", 1)[-1].lower()
    return re.sub(r"[^a-z0-9]+", "-", last)[:40].strip("-") or "served"


def _tier(role: str, replicas: int, wishes: Wishes, machine: Machine) -> dict[str, Any]:
    tier: dict[str, Any] = {"name": role, "role": role, "replicas": replicas}
    if machine.accelerator:
        tier["hardware"] = {"accelerator": machine.accelerator, "node_gpus": len(machine.gpu_memory)}
    if role == "decode" and wishes.power_cap_w:
        if machine.gpu_memory and not machine.takes_caps:
            raise DeployError("--power-cap: the driver of these GPUs reports no power limits: leave it out")
        tier["power_cap_w"] = wishes.power_cap_w
    return tier


def _on_gpus(wishes: Wishes, model: Architecture, machine: Machine) -> tuple[dict[str, Any], _Engines]:
    gpus, options = len(machine.gpu_memory), dict(wishes.options)
    there = min(machine.gpu_memory) * float(options.get("gpu-memory-utilization", GPU_SHARE))
    for name in ("tensor-parallel-size", "pipeline-parallel-size"):
        if options.get(name, 1) < 1:
            raise DeployError(f"--{name}: expected 1 or more, not {options[name]}")
    pipeline = int(options.get("pipeline-parallel-size", 1))
    ranks = int(options.get("tensor-parallel-size", 0))
    ranks = ranks or _ranks(model, max(1, gpus // pipeline), there * pipeline)
    options.setdefault("gpu-memory-utilization", GPU_SHARE)
    if ranks > 1:
        options["tensor-parallel-size"] = ranks
    each = ranks * pipeline
    most = gpus // each
    if not most:
        raise DeployError(f"an engine with {each} GPUs does not fit this machine, which has {gpus}")
    left = there - GPU_WORKSPACE - model.weight_bytes / each
    where = f"a GPU with {there / GIB:.0f} GiB for weights and KV"
    context = _context(wishes, model, left * pipeline, ranks, where)
    splits = most > 1 and pipeline == 1 and not speculates(options)  # what transfers support
    prefillers = _prefillers(model, machine, ranks, most, left) if splits else 0
    chosen = _Engines(*_split(wishes, most, prefillers), context)
    asked = chosen.prefill + chosen.decode
    if asked > most:
        raise DeployError(
            f"{asked} engines with {each} GPU{'s' if each > 1 else ''} each do not fit this machine's {gpus} "
            f"GPUs: at most {most} engine{'s' if most > 1 else ''}; lower --prefill or --decode, or describe "
            "several machines in a fleet file (--print)"
        )
    return {"device": "cuda", "args": options}, chosen


def _split(wishes: Wishes, engines: int, prefillers: int) -> tuple[int, int]:
    """Return the numbers of prefillers and decoders on a machine that can run `engines` engines.

    If the user gave one of the numbers, the other is the rest of `engines`. If the user gave neither, there
    are `prefillers` prefillers; with 0, each engine prefills and decodes.
    """
    prefill, decode = wishes.prefill, wishes.decode
    if prefill is None:
        prefill = max(0, engines - decode) if decode and prefillers else prefillers
    return prefill, max(1, engines - prefill) if decode is None else decode


def _ranks(model: Architecture, gpus: int, there: float) -> int:
    """Return the fewest GPUs of an engine that leave ample room for KV, or the most if no number does."""
    sizes = [
        size for size in (1, 2, 4, 8, 16) if size <= gpus and (not model.heads or model.heads % size == 0)
    ]
    roomy = [size for size in sizes if model.weight_bytes / size <= WEIGHTS_SHARE * there]
    if not roomy and model.weight_bytes / sizes[-1] + GPU_WORKSPACE >= there:
        raise DeployError(
            f"weights of {model.weight_bytes / GIB:.0f} GiB do not fit {gpus} x {there / GIB:.0f} GiB of GPU "
            "memory with room for KV: take a smaller or a quantised model, or a machine with more GPUs"
        )
    return (roomy or sizes[-1:])[0]


def _prefillers(model: Architecture, machine: Machine, ranks: int, engines: int, left: float) -> int:
    """Return how many of `engines` prefill, by the rule of `conserve plan` for a typical conversation."""
    board = ACCELERATORS.get(machine.accelerator or "", ACCELERATORS["A100-80GB"])
    try:
        decoders = provision(TYPICAL, _capacity(model, board, ranks, left, TYPICAL)).decoders
    except ProvisioningError:  # not one typical conversation fits a decoder: it needs all that there are
        decoders = engines
    return min(engines - 1, max(1, round(engines / (1 + decoders))))


def _capacity(model: Architecture, board: Accelerator, ranks: int, left: float, means: Means) -> Capacity:
    parameters = model.weight_bytes / 2
    prefill = REACHED * board.tflops * 1e12 * ranks / (2 * parameters)
    kv_tokens = left / model.kv_bytes(1, ranks, 2)
    slots = kv_tokens / means.peak_kv_tokens
    step_s = (model.weight_bytes / ranks + left) / (REACHED * board.bandwidth_gbs * 1e9)
    return Capacity(prefill, slots / step_s, kv_tokens)


def _on_cpu(wishes: Wishes, model: Architecture, machine: Machine) -> tuple[dict[str, Any], _Engines]:
    width = BYTES.get(wishes.dtype, 0) or BYTES.get(model.dtype, 2)
    weights = model.weight_bytes * width / BYTES.get(model.dtype, width)
    free = CPU_SHARE * machine.memory
    kv = max(CPU_KV, model.kv_bytes(ceil(((wishes.max_context or 0) + HEADROOM) / FILL), 1, width))
    splits = 3 * (weights + CPU_WORKSPACE + kv) <= free and not speculates(wishes.options)
    prefill, decode = _split(wishes, 3 if splits else 1, 1 if splits else 0)
    count = prefill + decode
    left = min(kv, free / count - weights - CPU_WORKSPACE)
    where = f"{count} engine{'s' if count > 1 else ''} and {machine.memory / GIB:.1f} GiB of free memory"
    context = _context(wishes, model, left, 1, where, width)
    args: dict[str, Any] = {
        "max-num-seqs": 16,
        "max-num-batched-tokens": 1_024,
        "block-size": CPU_BLOCK,
        "enforce-eager": True,
    }
    if model.layer_kinds <= 1 and not model.states:  # else blocks of several kinds share the memory
        args["num-gpu-blocks-override"] = int(left / model.kv_bytes(CPU_BLOCK, 1, width))
    engine = {
        "device": "cpu",
        "threads": max(1, machine.cores // count),
        "start_together": max(1, machine.cores),
        "env": {"VLLM_CPU_KVCACHE_SPACE": str(ceil(left / GIB))},
        "args": {**args, **wishes.options},
    }
    return engine, _Engines(prefill, decode, context)


def _context(wishes: Wishes, model: Architecture, left: float, ranks: int, where: str, width: int = 2) -> int:
    """Return the maximum context: what the user asked for, or the model's, or less if its KV does not fit."""
    fits = max(0, int(FILL * left / model.kv_bytes(1, ranks, width)) - HEADROOM)
    asked = wishes.max_context or min(model.max_context or fits, fits)
    room = f"room for conversations of {fits} tokens" if left > 0 else "no room for them"
    if fits < max(LEAST_CONTEXT, wishes.max_context or 0):
        asks_much = fits >= LEAST_CONTEXT
        first = f"conversations of {wishes.max_context} tokens do not fit: " if asks_much else ""
        lower = "lower --max-model-len, " if asks_much else ""
        raise DeployError(
            f"{first}{wishes.model} has {model.weight_bytes / GIB:.1f} GiB of weights, and with {where} "
            f"there is {room}: {lower}take a smaller or a quantised model, fewer engines, or a machine with "
            "more memory"
        )
    return asked if asked <= LEAST_CONTEXT else asked // CPU_BLOCK * CPU_BLOCK
