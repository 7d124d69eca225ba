"""What a replay is asked to do."""

from dataclasses import dataclass
from enum import StrEnum


class Dialect(StrEnum):
    VLLM = "vllm"  # asks for exactly as many tokens as the trace has (`ignore_eos`, `min_tokens`)
    OPENAI = "openai"  # standard fields only: an answer may end early


class ToolStyle(StrEnum):
    CALLS = "calls"  # assistant tool calls and tool results
    TEXT = "text"  # user messages, for chat templates without tools


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    url: str  # up to and without /v1
    model: str = ""  # empty: the first the endpoint lists
    api_key: str = ""
    dialect: Dialect = Dialect.VLLM
    tools: ToolStyle = ToolStyle.CALLS
    max_conversations: int = 256  # in flight; later ones start late, which is counted
    time_limit_s: float = 600.0  # of the replay proper: what is not done then is reported as unfinished
    request_timeout_s: float = 300.0
    retries: int = 8  # of a turn that was refused with 429 or 503
    probes: int = 3  # conversations played alone first, to know the unloaded latency; 0: no SLO
    slo_factor: float = 5.0
    conversation_header: str = ""  # send the conversation's id in this header; agents do not
    metrics_urls: tuple[str, ...] = ()  # besides the endpoint's own /metrics: the engines'
    salt: str = "0"  # another salt, other texts: nothing in a cache from the run before
