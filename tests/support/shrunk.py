"""Edit fleet files for GPUs so that a machine without GPUs can run them.

The edited file has the small model on CPUs, the given number of engines per tier and a gigabyte of host
memory. Everything else in the file stays.
"""

from typing import Any

import yaml

from tests.support.fleet import ROOT, Edit

GPU_OPTIONS = ("tensor-parallel-size", "gpu-memory-utilization", "hf-overrides")
MAX_BATCHED_TOKENS = 4096  # a larger value takes memory that other tests need


def shrunk(replicas: dict[str, int], more: Edit = lambda content: None) -> Edit:
    """Return an edit for `fleet_up` with the given number of replicas of each tier."""
    random = yaml.safe_load((ROOT / "configs" / "random.yaml").read_text())

    def edit(content: Any) -> None:
        engine, small = content["engine"], random["engine"]
        kept = {name: value for name, value in engine.get("args", {}).items() if name not in GPU_OPTIONS}
        content["engine"] = {**engine, **small, "start_together": 2, "args": {**small["args"], **kept}}
        content["model"] = random["model"]
        content["gateway"]["host"] = "127.0.0.1"
        content["kv"]["host_kv_gib"] = 1
        for tier in content["tiers"]:
            tier["replicas"] = replicas[tier["name"]]
            tier["resources"] = dict.fromkeys(tier["resources"], 1)
            del tier["hardware"]
            tier.pop("power_cap_w", None)
            batched = tier["args"].get("max-num-batched-tokens", MAX_BATCHED_TOKENS)
            tier["args"]["max-num-batched-tokens"] = min(batched, MAX_BATCHED_TOKENS)
        more(content)

    return edit
