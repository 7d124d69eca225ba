"""Runs of openai-agents on the Responses API, each of which continues the previous response by its id."""

import common
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
url, model = common.endpoint()
agent = Agent(
    name="weather agent",
    instructions=common.SYSTEM,
    model=OpenAIResponsesModel(model, AsyncOpenAI(base_url=url, api_key="openai-agents-responses")),
    model_settings=ModelSettings(max_tokens=32, store=True),
)
previous = None
for question in (common.TASK, "And tomorrow?", "And the day after?"):
    result = Runner.run_sync(agent, question, previous_response_id=previous, max_turns=2)
    previous = result.last_response_id
common.report(3)
