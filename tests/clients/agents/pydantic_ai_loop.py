"""Tool loop of a pydantic-ai agent, which calls tools or returns a typed result until its request limit."""

import common
from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, RunContext, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, model = common.endpoint()


class WarmerCity(BaseModel):
    warmer: common.City


agent = Agent(
    OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="pydantic-ai")),
    output_type=WarmerCity,
    system_prompt=common.SYSTEM,
    model_settings={"max_tokens": 192},
    retries=3,
)


@agent.tool_plain
def weather(city: common.City) -> str:
    """Return the weather of a city."""
    return common.weather(city)


@agent.output_validator
def after_a_second_look(context: RunContext[None], verdict: WarmerCity) -> WarmerCity:
    if context.usage.requests < 3:
        raise ModelRetry("Look the weather up again before you decide.")
    return verdict


try:
    result = agent.run_sync(common.TASK, usage_limits=UsageLimits(request_limit=common.TURNS))
    requests = result.usage.requests
except UsageLimitExceeded:
    requests = common.TURNS
common.report(requests)
