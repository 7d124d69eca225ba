"""Results of replays to read: one alone or several side by side, in a terminal or as one page of HTML."""

from traces.report.page import page
from traces.report.terminal import terminal

__all__ = ["page", "terminal"]
