"""What goes in comes out: tokens, KV and time, checked at the end of every run."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isclose

from traces.simulator.entities.engine import Engine


class Leak(AssertionError):
    """A run lost or invented something: its results are not to be trusted."""


@dataclass
class Books:
    """What the router of a simulation asked for, to be compared with what the engines did."""

    to_prefill: int = 0
    to_decode: int = 0
    needed_prefill: int = 0  # by a fleet that forgets nothing
    sent: int = 0  # prompts as clients send them, what is cached included
    refused: int = 0
    abandoned: int = 0
    transfers: int = 0
    transferred: int = 0
    restored: int = 0
    through_prefiller_again: int = 0
    gate_wait_s: float = 0.0


def check(books: Books, engines: Iterable[Engine], horizon: float, waiting: int) -> None:
    if waiting:
        raise Leak(f"{waiting} conversations still wait at the gate although nothing is left to happen")
    prefilled = decoded = again = 0
    for engine in engines:
        prefilled += engine.prefilled
        decoded += engine.decoded
        again += engine.recomputed
        kv = engine.kv
        if kv.resident or kv.parked or engine.running or engine.waiting:
            raise Leak(
                f"{engine.name} ends with {kv.resident} tokens resident, {kv.parked} parked, "
                f"{engine.running} turns running and {len(engine.waiting)} waiting"
            )
        spent = sum(engine.seconds_until(horizon))
        if not isclose(spent, horizon, rel_tol=1e-6, abs_tol=1e-6):
            raise Leak(f"{engine.name} accounts for {spent} of {horizon} s, so its joules are wrong")
    if prefilled != books.to_prefill + again:
        raise Leak(f"{prefilled} tokens were prefilled, {books.to_prefill} + {again} again were asked for")
    if decoded != books.to_decode:
        raise Leak(f"{decoded} tokens were decoded, {books.to_decode} were asked for")
