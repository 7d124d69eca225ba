"""Random numbers by mean and spread, from the standard library's generator: the same on every machine."""

import math
from random import Random


def stream(seed: int, purpose: str) -> Random:
    """A generator of its own for each purpose, so that one more draw for lengths never moves an arrival."""
    return Random(f"{seed}/{purpose}")


def lognormal(random: Random, mean: float, cv: float) -> float:
    if cv == 0.0:
        return mean
    variance = math.log1p(cv * cv)
    return random.lognormvariate(math.log(mean) - variance / 2.0, math.sqrt(variance))


def tokens(random: Random, mean: float, cv: float, least: int = 1) -> int:
    return max(least, round(lognormal(random, mean, cv)))


def geometric(random: Random, mean: float) -> int:
    """At least 1."""
    if mean <= 1.0:
        return 1
    return 1 + int(math.log(1.0 - random.random()) / math.log(1.0 - 1.0 / mean))
