"""Tool loop of openai-agents on chat completions: one forced tool call, then the answer."""

import common
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
url, model = common.endpoint()


@function_tool
def weather(city: common.City) -> str:
    """Return the weather of a city."""
    return common.weather(city)


agent = Agent(
    name="weather agent",
    instructions=common.SYSTEM,
    model=OpenAIChatCompletionsModel(model, AsyncOpenAI(base_url=url, api_key="openai-agents")),
    tools=[weather],
    model_settings=ModelSettings(tool_choice=common.TOOL_NAME, max_tokens=128),
)
result = Runner.run_sync(agent, common.TASK, max_turns=common.TURNS)
common.report(len(result.raw_responses))
