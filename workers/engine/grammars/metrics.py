"""Metrics of grammar checks, on the engine's own metrics page."""

from prometheus_client import Counter, Histogram

CHECKS = Counter(
    "conserve_grammar_checks_total",
    "Grammars that requests asked this engine for, by outcome: compiled, known (compiled or refused "
    "before), invalid, over_budget, unavailable (the compiling process was lost, or busy for too "
    "long).",
    ["outcome"],
)
SECONDS = Histogram(
    "conserve_grammar_compile_seconds",
    "Lifetime of the process that compiles a grammar.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
)
for _outcome in ("compiled", "known", "invalid", "over_budget", "unavailable"):
    CHECKS.labels(_outcome)
