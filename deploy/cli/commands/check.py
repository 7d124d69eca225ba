"""conserve check: say whether a fleet file is valid."""

from deploy.cli.common import FleetFile
from deploy.fleet import FleetSpec, load_fleet
from deploy.fleet.engine_checks import shorter_prompts
from deploy.models.built_in import parsers


def check(file: FleetFile) -> None:
    """Say whether a fleet file is valid; if not, name each mistake with its line."""
    fleet = load_fleet(file, to_start=True)
    tiers = ", ".join(f"{tier.replicas} x {tier.name} ({tier.role})" for tier in fleet.tiers)
    print(f"{file}: valid: fleet '{fleet.name}', model {fleet.model.name}, {tiers}")
    print_notes(fleet)


def print_notes(fleet: FleetSpec) -> None:
    """Print which parsers the model's answers get, and why, and which tiers cannot hold every prompt."""
    for choice in parsers(fleet.model.path):
        by_hand = fleet.engine.args.get(choice.option)
        print(f"{choice.option}: {by_hand} (as engine.args says)" if by_hand else choice)
    for note in shorter_prompts(fleet):
        print(note)
