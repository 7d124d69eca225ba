"""Tool loop of mini-swe-agent; its commands are answered but not executed."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
os.environ["MSWEA_SILENT_STARTUP"] = "1"

import common
from minisweagent.agents.default import DefaultAgent
from minisweagent.models.litellm_model import LitellmModel

url, model = common.endpoint()


class AnsweringShell:
    """Stand-in for the agent's shell, because the commands of a random model must not run."""

    def __init__(self) -> None:
        self.config = type("Config", (), {"model_dump": lambda self, **_: {}})()

    def execute(self, action, *args, **kwargs):
        return {"output": "no such file", "returncode": 1, "exception_info": ""}

    def get_template_vars(self, **kwargs):
        return {}

    def serialize(self):
        return {}


llm = LitellmModel(
    model_name=f"openai/{model}",
    model_kwargs={"api_base": url, "api_key": "mini-swe-agent", "max_tokens": 64},
    cost_tracking="ignore_errors",
)
agent = DefaultAgent(
    llm,
    AnsweringShell(),
    system_template=common.SYSTEM,
    instance_template="{{task}}",
    step_limit=common.TURNS,
    cost_limit=0,
)
agent.run(common.TASK)
common.report(agent.n_calls)
