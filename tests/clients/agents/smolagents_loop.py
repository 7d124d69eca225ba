"""Tool loop of a smolagents ToolCallingAgent, which ends with its own `final_answer` tool."""

import common
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

url, model = common.endpoint()


@tool
def weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: Paris or Rome.
    """
    return f"{city}: 21 degrees"


class CountingModel(OpenAIServerModel):
    requests = 0

    def generate(self, *args, **kwargs):
        CountingModel.requests += 1
        return super().generate(*args, **kwargs)


llm = CountingModel(model_id=model, api_base=url, api_key="smolagents", max_tokens=256)
agent = ToolCallingAgent(
    tools=[weather],
    model=llm,
    max_steps=12,
    verbosity_level=0,
    final_answer_checks=[lambda answer, memory, agent: len(memory.steps) > 3],  # not before step 4
)
agent.run(common.TASK)
common.report(CountingModel.requests)
