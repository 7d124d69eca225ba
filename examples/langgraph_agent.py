"""An agent with a tool, built with LangGraph: pip install langchain langchain-openai"""

import os

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from openai import OpenAI

URL = os.environ.get("CONSERVE_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("CONSERVE_API_KEY", "anything")


def files_in(folder: str) -> list[str]:
    """List the files of a folder."""
    return sorted(os.listdir(folder))[:20]


name = OpenAI(base_url=f"{URL}/v1", api_key=KEY).models.list().data[0].id
model = ChatOpenAI(model=name, base_url=f"{URL}/v1", api_key=KEY)
agent = create_agent(model, [files_in])
answer = agent.invoke({"messages": [("user", "Which files are in the folder '.'?")]}, {"recursion_limit": 8})
print(answer["messages"][-1].content)
