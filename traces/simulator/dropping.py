"""Lets engines of a simulated fleet drop parameters. The product's own signal and plan decide when.

Engines that share a model step together: each forms its own batch within its own token budget, as real
engines do. A round takes as long as the longest of these batches, plus the hops between engines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from placement.engines import Role
from placement.overload.drop_plan import DropLimits, DropPlan, EngineShape, Member, plan_drop
from placement.routing.placer import Placer
from placement.scheduling.latency_model import BatchWork
from traces import TraceError
from traces.simulator.engine import EventQueue, Regrouping, SimulatedEngine
from traces.simulator.tiers import SimulatedTier


@dataclass(frozen=True, slots=True)
class DroppingSettings:
    limits: DropLimits
    look_s: float = 1.0  # time between two looks at the fleet, as in the directory


class RoundsTogether:
    """Pipeline of a group, whose members' iterations begin and end together."""

    def __init__(self, members: Sequence[SimulatedEngine], shape: EngineShape, events: EventQueue) -> None:
        self.members = tuple(members)
        self._shape, self._events = shape, events
        self._due = False
        self._ends = 0.0

    def ready(self, engine: SimulatedEngine) -> None:
        if not self._due:
            self._due = True
            self._events.at(max(self._ends, self._events.now), self._round, None)

    def _round(self, _: Any) -> None:
        self._due = False
        model, formed = self._shape.latency, [member.form() for member in self._here()]
        assert model is not None
        batches = [decoding + BatchWork.of(prompts) for decoding, prompts in formed]
        tokens = sum(batch.new_tokens for batch in batches)
        if not tokens:
            return
        batch_s = [model.seconds(batch) for batch in batches if batch.requests]
        size = len(self.members)
        seconds = max(batch_s) + self._shape.hops_s(size, tokens / size)
        self._ends = self._events.now + seconds
        for member in self._here():
            member.step(seconds)

    def _here(self) -> list[SimulatedEngine]:
        """Return the members that have ended their iteration and wait for the round."""
        return [member for member in self.members if member.pipeline is self and member.idle]


@dataclass
class OverloadTally:
    """Counts of drops and restores, and the time during which some engines shared a model."""

    drops: int = 0
    restores: int = 0
    split_s: float = 0.0


class Dropping:
    """Observes the fleet, and drops and restores parameters. Groups are formed within one tier."""

    def __init__(
        self,
        settings: DroppingSettings,
        tier: SimulatedTier,
        engines: Sequence[SimulatedEngine],
        placer: Placer,
        events: EventQueue,
        report: Callable[[], list[int]],
        changed: Callable[[SimulatedEngine], None],
    ) -> None:
        """Observe the engines of one tier.

        `report` updates the placer's view, and returns the tokens of each prompt that waits for a decoder.
        `changed` is called with each engine whose amount of KV has changed.
        """
        if tier.profile.shape is None:
            raise TraceError(
                f"tier {tier.name!r}: to drop layers, its profile needs "
                "`layers`, `layer_bytes` and `activation_bytes`"
            )
        self.tally = OverloadTally()
        self._settings, self._shape = settings, tier.profile.shape
        self._engines = {engine.name: engine for engine in engines}
        self._groups: dict[str, RoundsTogether] = {}
        self._placer, self._events = placer, events
        self._report, self._changed = report, changed
        self._looked_at = 0.0
        events.at(settings.look_s, self._look, None)

    def _look(self, _: Any) -> None:
        now = self._events.now
        state = self._placer.observe_overload(now, self._report())
        whole = self._shape.kv_tokens * len(self._engines)
        gained = sum(engine.kv.capacity for engine in self._engines.values()) - whole
        self.tally.split_s += (now - self._looked_at) * bool(self._groups)
        self._looked_at = now
        if state.overloaded and state.lacking_tokens > gained:
            self._drop(
                plan_drop(self._members(), self._shape, state.lacking_tokens - gained, self._settings.limits)
            )
        elif self._groups and not state.overloaded and self._fits():
            self._restore()
        if self._events.more:
            self._events.at(now + self._settings.look_s, self._look, None)

    def _members(self) -> list[list[Member]]:
        apart = [[engine] for name, engine in self._engines.items() if name not in self._groups]
        together = [list(group.members) for group in dict.fromkeys(self._groups.values())]
        return [
            [Member(one.name, one.kv.live - one.kv.idle, one.running) for one in group]
            for group in (*apart, *together)
        ]

    def _drop(self, plan: DropPlan) -> None:
        for group in plan.merged:
            self._split(group.engines, group.kv_tokens)
            self.tally.drops += 1

    def _split(self, names: Sequence[str], kv_tokens: int) -> None:
        members = [self._engines[name] for name in names]
        group = RoundsTogether(members, self._shape, self._events)
        for member in members:
            before = len(self._groups[member.name].members) if member.name in self._groups else 1
            self._regroup(member, group, kv_tokens, before, len(names))
            self._groups[member.name] = group

    def _regroup(
        self, engine: SimulatedEngine, group: RoundsTogether | None, kv_tokens: int, before: int, after: int
    ) -> None:
        """Move an engine to another group or to none. The engine pauses while KV and parameters move."""
        exchange_s = self._shape.exchange_s(before, after, engine.kv.resident)
        parameters_s = self._shape.restore_s(before) if group is None else 0.0
        engine.regroup(Regrouping(group, kv_tokens, exchange_s + parameters_s))
        self._placer.resize(engine.name, kv_tokens)
        self._changed(engine)

    def _fits(self) -> bool:
        return all(
            engine.kv.live - engine.kv.idle <= self._shape.kv_tokens for engine in self._engines.values()
        )

    def _restore(self) -> None:
        self.tally.restores += 1
        groups, self._groups = self._groups, {}
        for name, group in groups.items():
            self._regroup(self._engines[name], None, self._shape.kv_tokens, len(group.members), 1)


def largest_holding_tier(tiers: Sequence[SimulatedTier]) -> SimulatedTier:
    """Return the tier with the most engines among those that hold conversations."""
    return max((tier for tier in tiers if tier.role is not Role.PREFILL), key=lambda tier: tier.replicas)
