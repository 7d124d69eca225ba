"""Definitions of TTFET and TBT, as gateways, replays, simulations and dashboards use them.

TTFET (time to first effective token): from the arrival of a user's message to the first token of content of
the turn that answers it to the user; the tool turns between, and their tools, count.

TBT (time between tokens) of a turn: the mean time between one token and the next, from its first token to its
last; a turn of one token has none. The last-turn TBT is that of the turn that speaks to the user.
"""


def ttfet_s(message_at: float, first_token_at: float) -> float:
    """Return the time to first effective token."""
    return first_token_at - message_at


def tbt_s(first_token_at: float, last_token_at: float, later_tokens: int) -> float | None:
    """Return the mean time between tokens; None if no token followed the first. `later_tokens` excludes the
    first.
    """
    return (last_token_at - first_token_at) / later_tokens if later_tokens > 0 else None
