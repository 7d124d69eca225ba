"""Names of our actors within the fleet's Ray namespace."""

DIRECTORY = "directory"
GATEWAYS = "gateways"
AUTOSCALER = "autoscaler"
_KEEPER = "keeper:"


def keeper_name(engine: str) -> str:
    return f"{_KEEPER}{engine}"


def engines_of(actors: list[str]) -> list[str]:
    """The engines whose keepers are among `actors`; replicas of a tier in order."""
    names = [actor.removeprefix(_KEEPER) for actor in actors if actor.startswith(_KEEPER)]
    return sorted(names, key=replica)


def replica(engine: str) -> tuple[str, int]:
    """Tier and index: `decode-10` is (`decode`, 10)."""
    tier, _, index = engine.rpartition("-")
    return tier, int(index)
