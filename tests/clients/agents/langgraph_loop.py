"""Tool loop of a LangGraph state graph: model, tool node, model again."""

import common
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

url, model = common.endpoint()


@tool
def weather(city: common.City) -> str:
    """Return the weather of a city."""
    return common.weather(city)


llm = ChatOpenAI(model=model, base_url=url, api_key="langgraph", max_tokens=128)
llm = llm.bind_tools([weather], tool_choice=common.TOOL_NAME)
answers: list = []


def call_model(state: MessagesState) -> dict:
    answers.append(llm.invoke(state["messages"]))
    return {"messages": answers[-1:]}


graph = StateGraph(MessagesState)
graph.add_node("model", call_model)
graph.add_node("tools", ToolNode([weather]))
graph.add_edge(START, "model")
graph.add_edge("model", "tools")
graph.add_conditional_edges("tools", lambda _: END if len(answers) >= common.TURNS else "model")
graph.compile().invoke({"messages": [("system", common.SYSTEM), ("user", common.TASK)]})
common.report(len(answers))
