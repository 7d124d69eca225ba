"""Definitions of TTFET and TBT, as gateways, replays, simulations and dashboards use them.

TTFET (time to first effective token) is the time from the arrival of a user's message to the first content
token of the turn that answers the user. Tool turns in between, and the time of their tools, are included.

TBT (time between tokens) is the mean time between one token of a turn and the next. A turn of one token has
no TBT. The last-turn TBT is the TBT of the turn that answers the user.
"""


def ttfet_s(message_at: float, first_token_at: float) -> float:
    """Return the time to first effective token."""
    return first_token_at - message_at


def tbt_s(first_token_at: float, last_token_at: float, later_tokens: int) -> float | None:
    """Return the mean time between tokens, or None if `later_tokens`, the tokens after the first, is 0."""
    return (last_token_at - first_token_at) / later_tokens if later_tokens > 0 else None
