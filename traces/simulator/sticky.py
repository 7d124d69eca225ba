"""Sticky routing as SGLang's router does it (`cache_aware`), one turn at a time and without any placing.

While the engines are about as busy as each other, a turn goes where most of its prompt has been sent before,
if that is more than `least_match` of it, else to the engine that was sent least. When they are not, it goes
to the least busy one. The router guesses caches from what it sent: it never asks an engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StickySettings:
    """The router's defaults."""

    least_match: float = 0.3
    balance_abs: int = 32
    balance_rel: float = 1.5


class StickyRouting:
    def __init__(self, settings: StickySettings, turns: Mapping[str, int]) -> None:
        """`turns`: how many each engine has, kept by the caller."""
        self._settings = settings
        self._turns = turns
        self._sent = dict.fromkeys(turns, 0)  # tokens of prompts, those sent before left out
        self._prefixes: dict[str, dict[str, int]] = {}  # conversation -> engine -> tokens, latest last

    def choose(self, conversation: str, prompt: int, repeated: int) -> str:
        """The engine for a turn; `repeated` of its prompt is as in the turn before."""
        sent = self._prefixes.setdefault(conversation, {})
        busiest, least = max(self._turns.values()), min(self._turns.values())
        best = max(reversed(sent), key=lambda name: min(sent[name], repeated), default=None)
        settings = self._settings
        if busiest - least > settings.balance_abs and busiest > settings.balance_rel * least:
            engine = min(self._turns, key=self._turns.__getitem__)
        elif best is not None and min(sent[best], repeated) > settings.least_match * prompt:
            engine = best
        else:
            engine = min(self._sent, key=self._sent.__getitem__)
        self._sent[engine] += prompt - min(sent.pop(engine, 0), repeated)
        sent[engine] = prompt
        return engine

    def forget(self, conversation: str) -> None:
        """It ended; what was sent for it stays in the engines' counts, as in the router's trees."""
        self._prefixes.pop(conversation, None)
