"""Configuration that vLLM makes from an engine's command line, on a stand-in for an H100.

`python -m tests.support.final_config < COMMANDS > CONFIGURATIONS` reads JSON with a command by name, and
writes JSON with a configuration by name. It is a process of its own, because vLLM detects its platform only
once. Choices that vLLM makes by the device (graphs, scheduling, runner) are those for a GPU. Nothing is
computed on a GPU.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.fleet import ROOT
from tests.support.vllm_options_file import text as vllm_options_text

Commands = dict[str, tuple[list[str], dict[str, str]]]  # arguments and environment by name
Flat = dict[str, str]
OPTIONS = "vllm_options"  # name that requests the file of vLLM's options instead of a configuration


def final_configurations(commands: Commands, limit_s: float = 400) -> dict[str, Flat]:
    """Return the configuration that vLLM makes from each command, with dotted paths as field names.

    A command that vLLM refuses has only the field `error`.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.final_config"],
        input=json.dumps(commands),
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Flat] = json.loads(done.stdout.splitlines()[-1])
    return found


def _stand_in_for_a_gpu() -> None:
    import vllm.platforms

    # The CUDA platform imports kernels, which a CPU build lacks. None of them is called here.
    sys.modules.setdefault("vllm._C_stable_libtorch", ModuleType("vllm._C_stable_libtorch"))
    vllm.platforms.builtin_platform_plugins.clear()
    vllm.platforms.builtin_platform_plugins["cuda"] = lambda: "tests.support.h100.H100"
    import vllm.config.vllm

    vllm.config.vllm.HAS_TRITON = True  # a CPU build has Triton without a backend
    _stand_in_for_nixl()
    _stand_in_for_the_loader()


def _stand_in_for_the_loader() -> None:
    """Replace the loader, which loads CUDA kernels, by one that records the detected class of a model."""

    @contextlib.contextmanager
    def atomic_writer(file: Any, mode: str = "w", encoding: str | None = None) -> Iterator[Any]:
        made = Path(f"{file}.{os.getpid()}")
        with made.open(mode, encoding=encoding) as output:
            yield output
        made.replace(file)

    loader = ModuleType("vllm.model_executor.model_loader")
    utilities = ModuleType(f"{loader.__name__}.weight_utils")
    utilities.atomic_writer = atomic_writer  # type: ignore[attr-defined]
    sys.modules.update({module.__name__: module for module in (loader, utilities)})


def _stand_in_for_nixl() -> None:
    """Replace the NIXL connector, whose module loads CUDA kernels, by its base class."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    class NixlConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
        pass

    for name in ("nixl", "nixl.connector"):
        module = ModuleType(f"vllm.distributed.kv_transfer.kv_connector.v1.{name}")
        module.NixlConnector = NixlConnector  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _flat(getattr(value, field.name, None), f"{path}.{field.name}" if path else field.name)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}")
    elif isinstance(value, Enum):
        yield path, value.name
    elif isinstance(value, str | int | float | bool | list | tuple | set | None):
        yield path, str(value)
    else:
        yield path, type(value).__name__


def _final(argv: list[str]) -> Flat:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    config = AsyncEngineArgs.from_cli_args(given).create_engine_config(UsageContext.OPENAI_API_SERVER)
    scheduling = config.scheduler_config
    return {
        **dict(_flat(config)),
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "scheduler": str(scheduling.scheduler_cls or scheduling.get_scheduler_cls()),
    }


def _main() -> None:
    commands: Commands = json.load(sys.stdin)
    _stand_in_for_a_gpu()
    found: dict[str, Flat] = {}
    for name, (argv, env) in commands.items():
        before = dict(os.environ)
        os.environ.update(env)
        with contextlib.redirect_stdout(sys.stderr):
            try:
                found[name] = _final(argv)
            except (ValueError, SystemExit) as error:
                found[name] = {"error": str(error)}
        os.environ.clear()
        os.environ.update(before)
    with contextlib.redirect_stdout(sys.stderr):
        found[OPTIONS] = {"text": vllm_options_text()}
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
