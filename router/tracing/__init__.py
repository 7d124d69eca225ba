"""Spans of sampled turns, sent by OTLP: identify, bind, prefill leg, transfer, decode leg.

A client's `traceparent` decides whether its turn is sampled; without one a share of the turns is. A sampled
turn's engines get a `traceparent` that names their leg's span; any other turn passes with its headers as they
came. Nothing is done a token. What a turn's moments are is written down while it runs, and made into messages
by the thread that sends them, for many turns at once: OpenTelemetry's own spans, encoder and exporter take
five times the CPU (docs/operate.md), which is why only its messages and its reader of headers are used.
"""

from router.tracing.tracer import Tracer
from router.tracing.turn import TurnTrace

__all__ = ["Tracer", "TurnTrace"]
