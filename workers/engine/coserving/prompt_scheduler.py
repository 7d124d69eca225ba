"""Scheduler of an engine without co-serving: a policy orders prompts and sizes their chunks."""

from dataclasses import replace
from typing import Any

from placement.scheduling.interface import ServingSettings
from workers.engine.compat import coserving_scheduler as internals
from workers.engine.coserving.config import CoServingConfig
from workers.engine.coserving.planned import PlannedScheduling


class PromptScheduling(PlannedScheduling):
    """Scheduling without co-serving: a policy decides the order and the chunks of prompts, vLLM the rest."""

    def adapted(self, config: CoServingConfig) -> CoServingConfig:
        serving = ServingSettings("prompts_in_order", config.serving.slo, config.serving.margin)
        return replace(config, serving=serving)

    def needs_plan(self) -> bool:
        return super().needs_plan() and self.waits_or_prefills()


class PromptScheduler(PromptScheduling, internals.SyncScheduler):
    """Scheduler for engines without asynchronous scheduling."""


class OverlappingPromptScheduler(PromptScheduling, internals.OverlappingScheduler):
    """Scheduler for engines with asynchronous scheduling."""


def prompt_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a synchronous or an asynchronous scheduler, as vLLM is configured.

    vLLM calls this function as its `--scheduler-cls`.
    """
    overlaps = vllm_config.scheduler_config.async_scheduling
    kind = OverlappingPromptScheduler if overlaps else PromptScheduler
    return kind(vllm_config, *args, **kwargs)
