"""conserve check: say whether a fleet file is valid."""

from deploy.cli.common import FleetFile
from deploy.fleet import FleetSpec, load_fleet
from deploy.models.built_in import parsers


def check(file: FleetFile) -> None:
    """Say whether a fleet file is valid; if not, name each mistake with its line."""
    fleet = load_fleet(file, to_start=True)
    tiers = ", ".join(f"{tier.replicas} x {tier.name} ({tier.role})" for tier in fleet.tiers)
    print(f"{file}: valid: fleet '{fleet.name}', model {fleet.model.name}, {tiers}")
    print_parsers(fleet)


def print_parsers(fleet: FleetSpec) -> None:
    """Print which parsers vLLM uses for the model's tool calls and reasoning, and why."""
    for choice in parsers(fleet.model.path):
        by_hand = fleet.engine.args.get(choice.option)
        print(f"{choice.option}: {by_hand} (as engine.args says)" if by_hand else choice)
