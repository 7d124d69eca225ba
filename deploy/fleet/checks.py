"""What a fleet needs beyond the right types: the policy's roles, names that differ, times that fit."""

from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec

from deploy.fleet.problems import Problem
from deploy.fleet.schema import Fleet
from placement.engines import Role

ARGUMENTS_OF_OURS = {
    "model": "model.path",
    "served-model-name": "model.served_name",
    "dtype": "model.dtype",
    "max-model-len": "model.max_context",
    "host": "",
    "port": "",
    "kv-transfer-config": "transfer and kv",
    "scheduler-cls": "coserving",
    "worker-cls": "coserving",
}


def check(fleet: Fleet) -> Iterator[Problem]:
    yield from _tier_names(fleet)
    yield from _roles(fleet)
    yield from _arguments(fleet)
    yield from _power(fleet)
    yield from _times(fleet)
    yield from _kv_tiers(fleet)
    yield from _autoscaling(fleet)
    if "default" not in fleet.slos:
        yield Problem(("slos",), "a class named 'default' is missing: conversations of no class count there")


def _tier_names(fleet: Fleet) -> Iterator[Problem]:
    counts = Counter(tier.name for tier in fleet.tiers)
    seen: set[str] = set()
    for index, tier in enumerate(fleet.tiers):
        if counts[tier.name] > 1 and tier.name in seen:
            yield Problem(("tiers", index, "name"), f"a tier named '{tier.name}' is already above")
        seen.add(tier.name)


def _roles(fleet: Fleet) -> Iterator[Problem]:
    present = {tier.role for tier in fleet.tiers if tier.replicas > 0}
    if fleet.policy == "collocated":
        if not present:
            yield Problem(("tiers",), "the policy 'collocated' needs a tier with at least one replica")
        return
    needed = (Role.PREFILL, Role.DECODE)
    for role in needed:
        if role not in present:
            yield Problem(
                ("tiers",),
                f"the policy '{fleet.policy}' needs a tier with role '{role}' and at least one replica",
            )
    for index, tier in enumerate(fleet.tiers):
        if tier.role not in needed:
            roles = " or ".join(f"'{role}'" for role in needed)
            yield Problem(
                ("tiers", index, "role"),
                f"the policy '{fleet.policy}' has no use for role '{tier.role}'; expected {roles}",
            )


def _arguments(fleet: Fleet) -> Iterator[Problem]:
    blocks = [(("engine", "args"), fleet.engine.args)]
    blocks += [(("tiers", index, "args"), tier.args) for index, tier in enumerate(fleet.tiers)]  # type: ignore[misc]
    for path, arguments in blocks:
        for name in arguments:
            plain = name.lstrip("-").replace("_", "-")
            if plain != name:
                yield Problem(
                    (*path, name), f"vLLM's options are written without dashes: '{plain}'", at_key=True
                )
            elif name in ARGUMENTS_OF_OURS:
                instead = ARGUMENTS_OF_OURS[name]
                hint = f"set {instead} instead" if instead else "it is chosen for each engine"
                yield Problem((*path, name), f"'{name}' is not set here: {hint}", at_key=True)


def _power(fleet: Fleet) -> Iterator[Problem]:
    for index, tier in enumerate(fleet.tiers):
        takes_none = fleet.engine.device == "cpu" and "GPU" not in tier.resources
        if tier.power_cap_w is not None and takes_none:
            yield Problem(
                ("tiers", index, "power_cap_w"),
                "a power cap needs GPUs, but engine.device is 'cpu' and the tier's resources name none",
            )


def _kv_tiers(fleet: Fleet) -> Iterator[Problem]:
    if "lmcache" not in fleet.kv.kv_tiers:
        return
    if find_spec("lmcache") is None:
        yield Problem(
            ("kv", "kv_tiers"),
            "'lmcache' is not installed: pip install --no-deps -r requirements/lmcache.txt",
        )
    if fleet.coserving.enabled:
        yield Problem(
            ("kv", "kv_tiers"),
            "'lmcache' stores KV of steps that co-serving may abort: use one or the other",
        )


def _times(fleet: Fleet) -> Iterator[Problem]:
    times = fleet.conversation
    if times.park_after > times.ttl:
        yield Problem(
            ("conversation", "park_after"),
            f"expected at most conversation.ttl ({times.ttl:g} s): a conversation is parked before it ends",
        )
    if fleet.engine.lease < 5:
        yield Problem(("engine", "lease"), "expected at least 5 s: a keeper needs that long to be restarted")
    if fleet.engine.health_interval == 0:
        yield Problem(("engine", "health_interval"), "expected more than 0 s")


def _autoscaling(fleet: Fleet) -> Iterator[Problem]:
    scaled: set[Role] = set()
    for index, tier in enumerate(fleet.tiers):
        limits, path = tier.autoscale, ("tiers", index, "autoscale")
        if limits is None:
            continue
        if not limits.min <= tier.replicas <= limits.max:
            yield Problem(path, f"expected min <= replicas <= max, but replicas is {tier.replicas}")
        if tier.role in scaled:
            yield Problem(path, f"one tier of role '{tier.role}' can follow the load, and one above does")
        scaled.add(tier.role)
    shares = fleet.capacity
    if not shares.low < shares.target < shares.high:
        yield Problem(("capacity",), "expected low < target < high")
