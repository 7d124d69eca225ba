"""Play a trace against an OpenAI endpoint as its agents would, and measure what they would see."""

from traces.errors import ReplayError
from traces.replay.options import Dialect, ReplayOptions, ToolStyle
from traces.replay.results import Replay
from traces.replay.run import Silent, Watcher, replay
from traces.replay.summary import Summary, summarise

__all__ = [
    "Dialect",
    "Replay",
    "ReplayError",
    "ReplayOptions",
    "Silent",
    "Summary",
    "ToolStyle",
    "Watcher",
    "replay",
    "summarise",
]
