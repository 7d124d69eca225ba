"""Replays a trace against an OpenAI endpoint as its agents would, and measures what they would see."""

from traces import ReplayError
from traces.replay.client import Dialect, ReplayOptions, ToolStyle
from traces.replay.results import Replay, ReplaySummary, summarise
from traces.replay.run import ReplayWatcher, replay

__all__ = [
    "Dialect",
    "Replay",
    "ReplayError",
    "ReplayOptions",
    "ReplaySummary",
    "ReplayWatcher",
    "ToolStyle",
    "replay",
    "summarise",
]
