"""Inbox for drop and restore commands, filled by the control socket's thread, emptied between iterations."""

import threading
from collections.abc import Callable

from kvtransfer.compat.block_cache import wake_engine
from kvtransfer.control.control_socket import EngineCommand, Reply
from placement.overload.drop_plan import MAX_GROUP_SIZE
from workers.engine.overload.orders import WorkerFacts


class CommandInbox:
    """Holder of one command at a time, from its arrival until the worker has carried it out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._command: EngineCommand | None = None
        self._arrived_at = 0.0
        self.facts: WorkerFacts | None = None  # of this engine, once its worker is ready
        self.epoch = 0  # of the current split, 0 if the model is whole
        self.newest_epoch = 0  # latest epoch of any command
        self.partners: tuple[str, ...] = ()  # the other members of the latest split

    @property
    def command(self) -> EngineCommand | None:
        return self._command

    @property
    def age_s(self) -> float:
        return self._clock() - self._arrived_at

    def drop(self, command: EngineCommand) -> Reply:
        members, part, facts = command.members, command.part, self.facts
        most = min(MAX_GROUP_SIZE, facts.layers) if facts is not None else 0
        if not 2 <= len(members) <= most or len(set(members)) < len(members):
            return Reply(error=f"a drop needs 2 to {most} different members, and {len(members)} were named")
        if not 0 <= part < len(members) or facts is None or members[part] != facts.address:
            return Reply(error=f"part {part} of these members is not this engine")
        return self._put(command, in_epoch=0)

    def restore(self, command: EngineCommand) -> Reply:
        return self._put(command, in_epoch=command.epoch)

    def done(self) -> None:
        """Free the inbox for the next command."""
        self._command = None

    def _put(self, command: EngineCommand, in_epoch: int) -> Reply:
        with self._lock:
            if self._command is not None:
                return Reply(error="a drop or a restore is under way")
            if self.epoch != in_epoch or not command.epoch:
                return Reply(
                    error=f"{command.command} {command.epoch}: the present epoch is {self.epoch or 'none'}"
                )
            self._command, self._arrived_at = command, self._clock()
            self.newest_epoch = max(self.newest_epoch, command.epoch)
            if command.members:
                self.partners = tuple(one for one in command.members if one != command.members[command.part])
        wake_engine()
        return Reply(True)
