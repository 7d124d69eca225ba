"""The fleet's API as the command line calls it: with the OpenAI SDK, as any client would."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import click
import openai

from deploy.cli.names import home_of
from deploy.fleet import load_fleet

API_KEY = "CONSERVE_API_KEY"
_TIMEOUT_S = 600.0


def client(url: str | None, fleet: str, api_key: str | None) -> openai.OpenAI:
    """At `url`, or where the named fleet serves on this machine."""
    key = api_key or os.environ.get(API_KEY)
    if url is None:
        home = home_of(fleet)
        run = home.read_run()
        if run is None or not run.endpoint:
            raise click.ClickException(
                f"fleet '{fleet}' is not up on this machine: start it with `conserve up`, or say --url"
            )
        url = run.endpoint
        if key is None and home.fleet_file.exists():
            key = next(iter(load_fleet(home.fleet_file).gateway.api_keys), None)
    base = url.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    return openai.OpenAI(base_url=base, api_key=key or "none", timeout=_TIMEOUT_S)


@contextmanager
def refusals_as_sentences() -> Iterator[None]:
    try:
        yield
    except openai.APIStatusError as refused:
        raise click.ClickException(f"{refused.status_code}: {_message(refused)}") from refused
    except openai.APIConnectionError as broken:
        raise click.ClickException(f"no answer from {broken.request.url}: is the fleet up?") from broken


def _message(refused: openai.APIStatusError) -> str:
    body = refused.body
    return str(body["message"]) if isinstance(body, dict) and "message" in body else refused.message
