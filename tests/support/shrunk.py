"""Fleet files for GPUs, cut down to what a machine without any takes: everything else in them stays.

The small model on CPUs instead of the file's, an engine or two of each tier, hosts' memory by the gigabyte.
"""

from typing import Any

import yaml

from tests.support.fleet import ROOT, Edit

OF_GPUS = ("tensor-parallel-size", "gpu-memory-utilization", "hf-overrides")
MOST_BATCHED = 4096  # tokens; more take memory that the machine shares


def shrunk(replicas: dict[str, int], more: Edit = lambda content: None) -> Edit:
    """An edit of `fleet_up`; `replicas` by tier."""
    random = yaml.safe_load((ROOT / "configs" / "random.yaml").read_text())

    def edit(content: Any) -> None:
        engine, small = content["engine"], random["engine"]
        its_own = {name: value for name, value in engine.get("args", {}).items() if name not in OF_GPUS}
        content["engine"] = {**engine, **small, "start_together": 2, "args": {**small["args"], **its_own}}
        content["model"] = random["model"]
        content["gateway"]["host"] = "127.0.0.1"
        content["kv"]["host_kv_gib"] = 1
        for tier in content["tiers"]:
            tier["replicas"] = replicas[tier["name"]]
            tier["resources"] = dict.fromkeys(tier["resources"], 1)
            del tier["hardware"]
            tier.pop("power_cap_w", None)
            batched = tier["args"].get("max-num-batched-tokens", MOST_BATCHED)
            tier["args"]["max-num-batched-tokens"] = min(batched, MOST_BATCHED)
        more(content)

    return edit
