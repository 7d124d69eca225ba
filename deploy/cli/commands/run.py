"""conserve run: start a coding agent that talks to a fleet."""

import json
import os
import shutil
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import typer

from deploy.agents import AGENTS, AgentEndpoint
from deploy.cli.common import FleetOption, gateway_of
from deploy.errors import DeployError
from deploy.home import conserve_home
from deploy.lifecycle.endpoint import certificate_of, trust_of

TIMEOUT_S = 10.0
LEAST_WORK = 4_096  # tokens of a conversation, after an agent's first prompt
AgentName = StrEnum("AgentName", list(AGENTS))  # type: ignore[misc]


def run(
    agent: Annotated[AgentName, typer.Argument(help="The agent; its program must be installed")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments for the agent, after --")] = None,
    fleet: FleetOption = None,
    url: Annotated[
        str | None, typer.Option(help="Address of a gateway elsewhere, as http://HOST:8000")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Served model; by default the first")] = None,
) -> None:
    """Start a coding agent that talks to a fleet.

    The agent's settings and sessions are in a directory of ConServe's, not in your own. The API key is
    $CONSERVE_API_KEY, if the fleet asks for keys.
    """
    trust: ssl.SSLContext | None = None
    certificate = ""
    if url is None:
        url, up = gateway_of(fleet)
        trust, certificate = trust_of(up), certificate_of(up)
    chosen = AGENTS[agent.value]
    program = shutil.which(chosen.program)
    if program is None:
        hint = f"install it with: npm install -g {chosen.package}"
        raise DeployError(f"the program {chosen.program!r} is not installed; {hint}")
    key = os.environ.get("CONSERVE_API_KEY") or "anonymous"
    endpoint = endpoint_at(url.rstrip("/").removesuffix("/v1"), key, model, trust)
    endpoint = replace(endpoint, certificate=certificate)
    if endpoint.context < chosen.first_prompt + LEAST_WORK:
        raise DeployError(
            f"{endpoint.model} takes {endpoint.context} tokens, and the first prompt of {agent.value} alone "
            f"has about {chosen.first_prompt}, beside which it needs {LEAST_WORK}: serve a model with a "
            "longer context, if possible 65536 or more"
        )
    setup = chosen.setup(conserve_home() / "agents" / agent.value, endpoint)
    setup.write()
    for line in described(setup.environment, key):
        print(line, file=sys.stderr)
    for path in setup.files:
        print(f"wrote {path}", file=sys.stderr)
    sys.stderr.flush()
    os.execve(program, [chosen.program, *(arguments or ())], setup.applied(os.environ))


def endpoint_at(url: str, key: str, model: str | None, trust: ssl.SSLContext | None = None) -> AgentEndpoint:
    """Ask the gateway at `url` for its models, and return the endpoint of `model`, or of its first model."""
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=trust) as answer:
            models: Sequence[dict[str, Any]] = json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        hint = "; set CONSERVE_API_KEY to a key of the fleet" if error.code in (401, 403) else ""
        raise DeployError(f"{url}/v1/models answered {error.code}{hint}") from None
    except (OSError, ValueError, KeyError) as error:
        raise DeployError(f"no gateway answers at {url}: {error}; give the address as --url") from None
    found = next((one for one in models if model in (None, one["id"])), None)
    if found is None:
        names = ", ".join(one["id"] for one in models)
        raise DeployError(f"the gateway at {url} does not serve {model!r}; it serves {names or 'no model'}")
    context = found.get("max_model_len")
    if not context:
        raise DeployError(f"no engine of the fleet at {url} is up yet: see conserve status")
    return AgentEndpoint(url, found["id"], key, context)


def described(environment: Mapping[str, str], key: str) -> list[str]:
    """Return the variables as lines NAME=VALUE, in which `key` is hidden."""
    return [f"{name}={'…' if value == key else value}" for name, value in sorted(environment.items())]
