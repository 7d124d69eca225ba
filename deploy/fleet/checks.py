"""Checks of a fleet file whose types are right: roles, names, times, and each component's own limits."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from pydantic import ValidationError

from deploy.errors import KeyPath, Problem
from deploy.fleet import components
from deploy.fleet.engine_checks import check_engines
from deploy.fleet.overload_checks import check_overload
from deploy.fleet.schema import FleetSpec, Spec
from deploy.home import FleetHome, FleetKeys
from kvtransfer import KVTransferError
from placement import PlacementError
from placement.engines import Role
from placement.routing.placer_settings import FirstTurns, PlacingPolicy, PrefillerRoles
from router.auth.keys_file import load_keys
from router.gateway.slo_classes import PRIORITY_S
from router.http import Certificate, TlsError
from router.requests.hints import HIGHEST_PRIORITY
from workers.processes import WorkerError

KEYS_OF_CONSERVE = ("safepoints", "offline_share", "ageing")  # under coserving
PLACEHOLDER = "replace-me"
ARGUMENTS_OF_OURS = {
    "model": "model.path",
    "served-model-name": "model.served_name",
    "dtype": "model.dtype",
    "max-model-len": "model.max_context",
    "api-key": "gateway.keys_file",
    **dict.fromkeys(("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs"), "gateway.tls"),
    **dict.fromkeys(("ssl-ciphers", "enable-ssl-refresh"), "gateway.tls"),
    **dict.fromkeys(("host", "port", "uds", "root-path", "middleware", "headless"), ""),
    "kv-transfer-config": "transfer and kv",
    "scheduler-cls": "coserving",
    "worker-cls": "coserving",
}


def check(fleet: FleetSpec) -> Iterator[Problem]:
    found = list(_of_the_file(fleet)) or list(check_engines(fleet))
    yield from found or _of_components(fleet)


def _of_the_file(fleet: FleetSpec) -> Iterator[Problem]:
    yield from _tier_names(fleet)
    yield from _roles(fleet)
    yield from _arguments(fleet)
    yield from _power(fleet)
    yield from _times(fleet)
    yield from _nixl(fleet)
    yield from _disk(fleet)
    yield from _kv_tiers(fleet)
    yield from _autoscaling(fleet)
    yield from _slos(fleet)
    yield from _exposed(fleet)
    yield from _coserving(fleet)
    yield from _embeddings(fleet)
    yield from _placement(fleet)
    yield from check_overload(fleet)


def _tier_names(fleet: FleetSpec) -> Iterator[Problem]:
    counts = Counter(tier.name for tier in fleet.tiers)
    seen: set[str] = set()
    for index, tier in enumerate(fleet.tiers):
        if counts[tier.name] > 1 and tier.name in seen:
            yield Problem(("tiers", index, "name"), f"a tier named '{tier.name}' is already above")
        seen.add(tier.name)


def _roles(fleet: FleetSpec) -> Iterator[Problem]:
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


def _placement(fleet: FleetSpec) -> Iterator[Problem]:
    placement = fleet.placement
    elastic = fleet.policy is PlacingPolicy.CONSERVE and placement.first_turns is FirstTurns.ELASTIC
    if placement.roles is PrefillerRoles.ELASTIC and not elastic:
        message = "'elastic' has an effect with policy 'conserve' and 'first_turns: elastic' only"
        yield Problem(("placement", "roles"), message)
    if placement.relieve_hot and not fleet.policy.disaggregates:
        message = f"engines of the policy '{fleet.policy}' cannot send KV to others: leave it out"
        yield Problem(("placement", "relieve_hot"), message)


def _arguments(fleet: FleetSpec) -> Iterator[Problem]:
    blocks = [(("engine", "args"), fleet.engine.args)]
    blocks += [(("tiers", index, "args"), tier.args) for index, tier in enumerate(fleet.tiers)]  # type: ignore[misc]
    for path, arguments in blocks:
        for name in arguments:
            head, *field = name.lstrip("-").split(".")
            plain = ".".join([head.replace("_", "-"), *field])
            if plain != name:
                yield Problem(
                    (*path, name), f"vLLM's options are written without dashes: '{plain}'", at_key=True
                )
            elif name in ARGUMENTS_OF_OURS:
                instead = ARGUMENTS_OF_OURS[name]
                hint = f"set {instead} instead" if instead else "ConServe sets up each engine's server"
                yield Problem((*path, name), f"'{name}' is not set here: {hint}", at_key=True)


def _power(fleet: FleetSpec) -> Iterator[Problem]:
    for index, tier in enumerate(fleet.tiers):
        takes_none = fleet.engine.device == "cpu" and "GPU" not in tier.resources
        if tier.power_cap_w is not None and takes_none:
            yield Problem(
                ("tiers", index, "power_cap_w"),
                "a power cap needs GPUs, but engine.device is 'cpu' and the tier's resources name none",
            )


def _nixl(fleet: FleetSpec) -> Iterator[Problem]:
    """Check that NIXL is installed, if engines run on this machine."""
    wanted = fleet.policy != "collocated" and fleet.transfer.backend == "nixl"
    if wanted and fleet.ray.address is None and find_spec("nixl") is None:
        yield Problem(
            ("transfer", "backend"),
            "'nixl' is not installed: pip install --no-deps nixl nixl_cu12, or set backend: tcp",
        )


def _disk(fleet: FleetSpec) -> Iterator[Problem]:
    if fleet.kv.disk_gib and not fleet.kv.disk_path:
        yield Problem(
            ("kv", "disk_gib"),
            "set kv.disk_path, too: a folder on a fast local disk of each engine's machine",
        )
    elif fleet.kv.disk_gib and not Path(fleet.kv.disk_path).is_absolute():
        yield Problem(
            ("kv", "disk_path"), "expected an absolute path, because each engine has its own working folder"
        )
    if fleet.kv.disk_gib and not (fleet.kv.host_kv_gib and "host" in fleet.kv.kv_tiers):
        yield Problem(
            ("kv", "disk_gib"),
            "KV goes to the disk from host memory: set kv.host_kv_gib above 0 and 'host' in kv.kv_tiers",
        )
    if fleet.kv.disk_path and not fleet.kv.disk_gib:
        yield Problem(("kv", "disk_path"), "it has no effect without kv.disk_gib: set that, or take this out")


def _kv_tiers(fleet: FleetSpec) -> Iterator[Problem]:
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


def _times(fleet: FleetSpec) -> Iterator[Problem]:
    times = fleet.conversation
    if times.park_after > times.ttl:
        yield Problem(
            ("conversation", "park_after"),
            f"expected at most conversation.ttl ({times.ttl:g} s): a conversation is parked before it ends",
        )
    if fleet.engine.lease < 5:
        yield Problem(("engine", "lease"), "expected at least 5 s: a keeper needs that long to be restarted")


def _slos(fleet: FleetSpec) -> Iterator[Problem]:
    owner: dict[str, str] = {}
    for name, slo in fleet.slos.items():
        known = {*fleet.gateway.api_keys, *fleet.gateway.admin_keys}
        for key in slo.owners:
            if (other := owner.setdefault(key, name)) != name:
                sentence = f"a key of this class is of class '{other}' too: a key may be in one class only"
                yield Problem(("slos", name, "keys"), sentence)
            if fleet.gateway.api_keys and not fleet.gateway.keys_file and key not in known:
                yield Problem(("slos", name, "keys"), "a key of this class is none of gateway.api_keys")
        longest = fleet.conversation.decoder_wait
        if slo.queue_weight and slo.queue_weight + HIGHEST_PRIORITY * PRIORITY_S >= longest:
            sentence = (
                f"expected less than conversation.decoder_wait ({longest:g} s) less {HIGHEST_PRIORITY:g} s, "
                "which priorities may add: turns of other classes would be refused before they can go first"
            )
            yield Problem(("slos", name, "ahead"), sentence)
    if "default" not in fleet.slos:
        yield Problem(("slos",), "a class named 'default' is missing: turns that have no other class need it")


def _exposed(fleet: FleetSpec) -> Iterator[Problem]:
    gateway = fleet.gateway
    for name in ("api_keys", "admin_keys"):
        if PLACEHOLDER in getattr(gateway, name):
            sentence = f"'{PLACEHOLDER}' is known to everybody: make a key with `conserve key new`"
            yield Problem(("gateway", name), sentence)
    if gateway.host not in components.LOOPBACK and not (components.asks_for_keys(fleet) or gateway.open):
        yield Problem(
            ("gateway", "host"),
            f"everybody who reaches {gateway.host} may call without a key: set gateway.keys_file "
            "(`conserve key new`), or gateway.open: true if only permitted callers reach it",
        )


def check_files(fleet: FleetSpec) -> Iterator[Problem]:
    """Check the keys file and the certificate, if they are on this machine; gateways may run on others."""
    keys_file, here = Path(fleet.gateway.keys_file or "").expanduser(), fleet.ray.address is None
    if fleet.gateway.keys_file and (here or keys_file.exists()):
        load_keys(keys_file)  # raises KeysFileError with lines of that file
    tls = fleet.gateway.tls
    if tls is None or (not here and not Path(tls.cert).expanduser().exists()):
        return
    try:
        Certificate(tls.cert, tls.key)
    except TlsError as wrong:
        yield Problem(("gateway", "tls", wrong.which), str(wrong))


def _coserving(fleet: FleetSpec) -> Iterator[Problem]:
    block = fleet.coserving
    for key in KEYS_OF_CONSERVE:
        if key in block.model_fields_set and block.policy != "conserve":
            sentence = f"'{key}' has an effect with policy 'conserve' only, not with '{block.policy}'"
            yield Problem(("coserving", key), sentence, at_key=True)


def _embeddings(fleet: FleetSpec) -> Iterator[Problem]:
    if fleet.model.embeddings and (fleet.policy != "collocated" or fleet.coserving.enabled):
        sentence = "a model that makes embeddings has no turns: policy 'collocated' and no co-serving"
        yield Problem(("model", "embeddings"), sentence)


def _autoscaling(fleet: FleetSpec) -> Iterator[Problem]:
    scaled: set[Role] = set()
    for index, tier in enumerate(fleet.tiers):
        limits, path = tier.autoscale, ("tiers", index, "autoscale")
        if limits is None:
            continue
        if not limits.min <= tier.replicas <= limits.max:
            yield Problem(path, f"expected min <= replicas <= max, but replicas is {tier.replicas}")
        if tier.role in scaled:
            yield Problem(path, f"only one tier of role '{tier.role}' may autoscale, and a tier above does")
        scaled.add(tier.role)
    shares = fleet.capacity
    if not shares.low < shares.target < shares.high:
        yield Problem(("capacity",), "expected low < target < high")


Building = tuple[tuple[KeyPath, ...], Callable[[], object]]  # blocks of the file, and what is built of them


def _of_components(fleet: FleetSpec) -> Iterator[Problem]:
    """Yield a problem for each setting that a component's own configuration refuses."""
    reported: set[str] = set()
    for blocks, build in _buildings(fleet):
        try:
            build()
        except ValidationError as error:
            messages = [str(detail["msg"]).removeprefix("Value error, ") for detail in error.errors()]
        except (ValueError, KVTransferError, PlacementError, WorkerError) as error:
            messages = [str(error)]
        else:
            continue
        yield from (Problem(_key_of(fleet, blocks, text), text) for text in messages if text not in reported)
        reported.update(messages)


def _buildings(fleet: FleetSpec) -> Iterator[Building]:
    home, address = FleetHome.of(fleet.name), "127.0.0.1:1"
    moving: tuple[KeyPath, ...] = (("transfer",), ("conversation",), ("kv",), ("kv", "lmcache"))
    offered: tuple[KeyPath, ...] = (("gateway",), ("gateway", "limits"), ("observe", "tracing"))
    yield moving, lambda: components.connector(fleet, Role.DECODE)
    yield (("coserving",),), lambda: components.coserving(fleet)
    yield (("engine",),), lambda: components.keeper_settings(fleet)
    yield (("conversation",), ("capacity",)), lambda: components.placer_settings(fleet)
    yield (("conversation",), ("capacity",)), lambda: components.directory_settings(fleet)
    keys = FleetKeys("of no fleet at all", fleet.name)
    yield offered, lambda: components.gateway_config(fleet, "gateway", address, keys, address)
    yield (("batch",),), lambda: components.batch_config(fleet, home, address, keys, "127.0.0.1", 1)
    for index, tier in enumerate(fleet.tiers):
        path: KeyPath = ("tiers", index)
        if (limits := tier.autoscale) is not None:
            yield ((*path, "autoscale"),), partial(components.scale_limits, fleet, limits)
        engine = components.EngineName(f"{tier.name}-0", tier)
        yield (path, ("engine",)), partial(components.engine_spec, fleet, engine, home, "127.0.0.1")
        yield (path, ("engine",)), partial(components.power_settings, fleet, engine, home, ())
        yield (path, ("engine",)), partial(components.shared_tier, fleet, engine, home)


def _key_of(fleet: FleetSpec, blocks: tuple[KeyPath, ...], message: str) -> KeyPath:
    """Return the path of the setting whose name `message` begins with, or `blocks[0]` if none has it."""
    name = re.match(r"\w*", message)[0].removesuffix("_s")  # type: ignore[index]
    for path in blocks:
        block: object = fleet
        for part in path:
            block = block[int(part)] if isinstance(block, list) else getattr(block, str(part), None)
        if isinstance(block, Spec) and name in type(block).model_fields:
            return (*path, name)
    return blocks[0]
