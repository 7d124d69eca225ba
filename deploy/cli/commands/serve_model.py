"""conserve serve: serve a model by its name on this machine, without writing a fleet file."""

import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from deploy.cli.commands import doctor
from deploy.cli.commands.check import print_notes
from deploy.cli.commands.key import put_key
from deploy.cli.commands.up import start_or_change
from deploy.errors import DeployError
from deploy.fleet import FleetSpec, parse_fleet, vllm_options
from deploy.fleet.components import LOOPBACK
from deploy.fleet.engine_checks import check_engines
from deploy.fleet.for_model import Machine, Wishes, fleet_for, fleet_name
from deploy.fleet.model_architecture import Architecture, find_architecture
from deploy.home import FleetHome, conserve_home
from deploy.lifecycle.up import is_up
from deploy.machine import describe, this_machine, vllm_build
from deploy.models import hub, smollm2
from deploy.models.built_in import is_here, lacking_file
from router.auth.keys import hash_secret
from workers.processes import write_atomically

API_KEY, TRACES = "CONSERVE_API_KEY", "OTEL_EXPORTER_OTLP_ENDPOINT"
OWN_OPTIONS = {
    "port": "--port before the --",
    "host": "--host before the --",
    "model": "the first argument",
    "api-key": f"the variable {API_KEY}",
}
OWN_NAMES = ("prefill", "decode", "power-cap", "coserving", "port", "host", "print", "detach")
HEADER = "# `conserve serve` writes this file anew: copy it before you change it, then `conserve up COPY`.\n"


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A directory, a Hugging Face id, or smollm2")],
    prefill: Annotated[
        int | None,
        typer.Option(
            help="Number of prefillers; without --decode, the other engines of this machine decode. 0: each "
            "engine prefills and decodes",
            min=0,
        ),
    ] = None,
    decode: Annotated[
        int | None,
        typer.Option(
            help="Number of decoders; without --prefill, the other engines of this machine prefill", min=1
        ),
    ] = None,
    power_cap: Annotated[
        int | None, typer.Option(help="Power limit of each GPU of decoders, W", min=1)
    ] = None,
    coserving: Annotated[
        bool | None,
        typer.Option(
            "--coserving/--no-coserving",
            help="Batch work in an engine stops between two layers for a turn; by default on where each "
            "engine also prefills and the model allows it",
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the gateway; by default 8000", min=1, max=65535)
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address that the gateway listens on (default: 127.0.0.1); any other needs CONSERVE_API_KEY"
        ),
    ] = None,
    print_file: Annotated[
        bool, typer.Option("--print", help="Print the fleet file, and start nothing")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return when the fleet serves")] = False,
) -> None:
    """Serve a model on this machine's GPUs, or on its CPU. Other options are passed to vLLM.

    As in: conserve serve Qwen/Qwen3-32B --prefill 1 --decode 3 --max-num-seqs 64

    A machine runs as many engines as fit its GPUs. Without GPUs it runs three, or one if memory is short.

    Callers must send the key in CONSERVE_API_KEY, if it is set; spans go to OTEL_EXPORTER_OTLP_ENDPOINT.
    HF_TOKEN and HF_HOME have the meaning that Hugging Face gives them.
    """
    if model.startswith("-"):
        raise DeployError("MODEL comes first, as in: conserve serve Qwen/Qwen3-32B --max-num-seqs 64")
    if host not in (None, *LOOPBACK) and not os.environ.get(API_KEY):
        raise DeployError(
            f"--host {host}: everybody who reaches that address could call; set {API_KEY} to the key that "
            "callers must send"
        )
    refuse_blocked(doctor.system())
    if model.strip() and model != smollm2.NAME and (folder := Path(model).expanduser()).is_dir():
        model = os.path.abspath(folder)  # the fleet file may be used in other folders
    wishes = replace(
        wishes_of(model, dict(vllm_arguments(context.args))),
        prefill=prefill,
        decode=decode,
        power_cap_w=power_cap,
        coserving=coserving,
        port=port,
        host=host,
    )
    file = conserve_home() / "serve" / f"{fleet_name(model)}.yaml"
    memory = file.with_suffix(".memory")
    machine = as_found(usable(this_machine()), FleetHome.of(fleet_name(model)), memory)
    content = fleet_for(wishes, architecture(model), machine)
    if coserving is None:
        content = without_refused_coserving(content)
    add_environment(content, keys := file.with_suffix(".keys"))
    if not (print_file and keys.exists()):  # a running fleet reads them
        put_environment_key(keys)
    text = yaml.safe_dump(content, sort_keys=False)
    fleet = parse_fleet(text, "the fleet file of these options", to_start=not print_file)
    chosen = f"{describe(machine)}: {describe_engines(fleet)}"
    text = f"# {chosen}\n{text}"
    if print_file:
        print(text, end="")
        return
    refuse_blocked(doctor.packages())
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, HEADER + text, 0o600)
    write_atomically(memory, str(machine.memory))
    print(f"{chosen}; as in {file}")
    print_notes(fleet)
    start_or_change(fleet, file, detach=detach, dry_run=False)


def as_found(machine: Machine, home: FleetHome, memory: Path) -> Machine:
    """Return `machine` with the free memory that its running fleet has found at its start, if one runs.

    Thus the same command makes the same fleet file while the fleet's engines take memory.
    """
    with suppress(OSError, ValueError):
        if is_up(home):
            return replace(machine, memory=int(memory.read_text()))
    return machine


def describe_engines(fleet: FleetSpec) -> str:
    """Describe a fleet's engines in words."""
    tiers = ", ".join(f"{tier.replicas} x {tier.name}" for tier in fleet.tiers)
    both = "" if fleet.policy.disaggregates else " (each also prefills)"
    return f"{tiers}{both}, conversations of up to {fleet.model.max_context} tokens"


def refuse_blocked(findings: Iterable[doctor.HealthLine]) -> None:
    for one in findings:
        if one.blocks:
            raise DeployError(f"{one.what}: {one.state}; {one.do}")


def without_refused_coserving(content: dict[str, Any]) -> dict[str, Any]:
    """Return the fleet file's `content`, without co-serving if `conserve check` would refuse co-serving."""
    without = {name: block for name, block in content.items() if name != "coserving"}
    try:
        others = set(check_engines(FleetSpec.of(without)))
        refused = [one for one in check_engines(FleetSpec.of(content)) if one not in others]
    except ValidationError:  # `parse_fleet` says what is wrong
        return content
    if not refused:
        return content
    print(f"no co-serving here: {refused[0].message}", file=sys.stderr)
    return without


def vllm_arguments(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each vLLM option in `words`, which are parsed as vLLM parses them."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            what = "is short: write the long name" if word.startswith("-") else "is no option of vLLM's"
            raise DeployError(f"'{word}' {what}, as in --tensor-parallel-size 2")
        name, equals, given = word[2:].partition("=")
        name = name.replace("_", "-")
        positive = name.removeprefix("no-")
        kind = vllm_options.options().get(name.split(".")[0])
        if kind == "flag" or (kind is None and vllm_options.options().get(positive) == "flag"):
            if equals:
                raise DeployError(f"--{name} takes no value: write --{positive} or --no-{positive}")
            yield positive, name == positive
            continue
        values = [given] if given else []
        while not given and rest and not re.match("--|-[A-Za-z]", rest[0]):
            values.append(rest.pop(0))
        read = [_value(one, kind) for one in values]
        value = read[0] if len(read) == 1 else read or None
        if problem := vllm_options.problem(name, value):
            own = [] if kind else difflib.get_close_matches(name, OWN_NAMES, n=1)
            raise DeployError(f"--{name}: " + (f"did you mean --{own[0]}?" if own else problem))
        yield name, value


def _value(text: str, kind: object) -> Any:
    with suppress(ValueError):
        if kind == "integer":
            return int(text)
        if kind == "number":
            return float(text)
        if text.startswith(("{", "[")):
            return json.loads(text)
    return text


def wishes_of(model: str, options: dict[str, Any]) -> Wishes:
    """Return the settings that vLLM's `options` ask for.

    Options with a key of their own in the fleet file, such as `max-model-len`, are removed from `options`.
    """
    for name, instead in OWN_OPTIONS.items():
        if name in options:
            raise DeployError(f"--{name} is not an option of each engine here: it is {instead}")
    longest = options.pop("max-model-len", None)
    if longest is not None and not (str(longest).isdigit() and int(longest)):
        raise DeployError(f"--max-model-len: expected a number of tokens, not {longest!r}")
    name = options.pop("served-model-name", None)
    if name is not None and not (isinstance(name, str) and name.strip()):
        raise DeployError("--served-model-name: expected one name; more are model.aliases in a fleet file")
    dtype = options.pop("dtype", "float32" if model == smollm2.NAME else "auto")
    trained = smollm2.TRAINED_CONTEXT if model == smollm2.NAME else None
    context = int(longest) if longest else trained
    return Wishes(model, dtype=dtype, max_context=context, served_name=name, options=options)


def architecture(model: str) -> Architecture:
    """Return the architecture of a model that can be served, or raise DeployError, which names others."""
    if model == smollm2.NAME and (built_in := find_architecture(model)):
        return built_in  # also beside a directory of that name
    path = Path(model).expanduser()
    if not model.strip():
        raise DeployError(f"no model was named: {hub.INSTEAD}")
    if path.is_file():
        raise DeployError(f"{path.absolute()} is a file, and vLLM loads a directory: {hub.INSTEAD}")
    is_path = path.is_dir() or model.startswith(("/", "./", "../", "~")) or model.count("/") > 1
    if is_path and not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "is no directory"
        raise DeployError(f"there is no model in {path.absolute()}, which {what}: {hub.INSTEAD}")
    weights = 0 if is_here(model) else hub.describe(model)
    found = find_architecture(model)
    if found is None:
        raise DeployError(f"the config.json of {model} is damaged: {hub.INSTEAD}")
    if not found.layers or not found.kv_bytes(1, 1, 1):
        raise DeployError(
            f"the config.json of {model} does not describe a language model, with num_hidden_layers and "
            f"num_attention_heads: {hub.INSTEAD}"
        )
    found = replace(found, weight_bytes=found.weight_bytes or weights)
    if not found.weight_bytes:
        raise DeployError(f"{model} has no weights in safetensors: {hub.INSTEAD}")
    if path.is_dir() and (lacking := lacking_file(path)):
        raise DeployError(f"the model in {path.absolute()} is incomplete: it lacks {lacking}; fetch it again")
    return found


def usable(machine: Machine) -> Machine:
    """Return the machine without its GPUs if vLLM's CUDA build is missing."""
    refuse_blocked(doctor.gpus(machine))
    if machine.gpu_memory and vllm_build() == "CPU":
        print(
            "There are GPUs here, and vLLM's CPU build is installed, which uses none: conserve doctor",
            file=sys.stderr,
        )
        return replace(machine, gpu_memory=(), accelerator=None)
    return machine


def put_environment_key(keys: Path) -> None:
    """Store the hash of the key in CONSERVE_API_KEY, beside keys that `conserve key new` has added.

    The key's scope is `serve`, because agents hold it and must not read other people's conversations.
    """
    if secret := os.environ.get(API_KEY):
        keys.parent.mkdir(parents=True, exist_ok=True)
        put_key(keys, {"id": "environment", "owner": "environment", "hash": hash_secret(secret)})


def add_environment(content: dict[str, Any], keys: Path) -> None:
    """Add settings from environment variables to the fleet file's `content`."""
    if os.environ.get(API_KEY):
        content["gateway"]["keys_file"] = str(keys)
    if endpoint := os.environ.get(TRACES):
        grpc = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") == "grpc"
        tracing = {"endpoint": endpoint, "sample": 1} | ({"protocol": "grpc"} if grpc else {})
        content["observe"] = {"tracing": tracing}
