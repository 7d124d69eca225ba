"""Which parts an engine's connector is made of, in the order they are called."""

from importlib import import_module

from kvtransfer.config import ConfigError, ConnectorConfig
from kvtransfer.parts import Part


def selected_parts(config: ConnectorConfig) -> list[Part]:
    return [load_part(path) for path in selected_part_paths(config)]


def selected_part_paths(config: ConnectorConfig) -> list[str]:
    """Own parts first, then those named in the configuration, in its order."""
    own: list[str] = []
    if config.own_transfer:
        own.append("kvtransfer.transfer.part:TransferPart")
    own.append("kvtransfer.keep:KeepPart")
    if config.host_kv_gib:
        own.append("kvtransfer.checkpoint.part:CheckpointPart")
    own.append("kvtransfer.report:ReportPart")
    return [*own, *config.parts]


def load_part(path: str) -> Part:
    """`module:Class`, so that rooms which may import this one (and tests) can bring parts of their own."""
    module, _, name = path.partition(":")
    try:
        part = getattr(import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"part {path!r} cannot be loaded: {error}") from error
    if not isinstance(part, Part):
        raise ConfigError(f"part {path!r} is not a kvtransfer.parts.Part")
    return part
