"""An agent with a tool, built with OpenAI's Agents SDK: pip install openai-agents"""

import asyncio
import os

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

URL = os.environ.get("CONSERVE_URL", "http://127.0.0.1:8000")


@function_tool
def files_in(folder: str) -> list[str]:
    """List the files of a folder."""
    return sorted(os.listdir(folder))[:20]


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("CONSERVE_API_KEY", "anything"))
    model = (await client.models.list()).data[0].id
    agent = Agent(
        name="Reader",
        instructions="You answer questions about files. Use the tool.",
        tools=[files_in],
        model=OpenAIChatCompletionsModel(model=model, openai_client=client),
    )
    result = await Runner.run(agent, "Which files are in the folder '.'?", max_turns=5)
    print(result.final_output)


asyncio.run(main())
