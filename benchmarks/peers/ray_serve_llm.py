"""Ray Serve LLM with its prefix-aware router, run by the Python of its own environment."""

import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.llm import LLMConfig, build_openai_app
from ray.serve.llm.request_router import PrefixCacheAffinityRouter


def main(settings: dict[str, Any]) -> None:
    replicas = settings["replicas"]
    ray.init(
        num_cpus=4 * replicas,
        object_store_memory=100 << 20,
        include_dashboard=False,
        _temp_dir=settings["folder"],
    )
    config = LLMConfig(
        model_loading_config={"model_id": settings["model_id"], "model_source": settings["model"]},
        engine_kwargs=settings["engine"],
        accelerator_config={"kind": "cpu"},
        placement_group_config={"bundles": [{"CPU": 1}]},
        runtime_env={"env_vars": settings["env"]},
        log_engine_metrics=False,
        deployment_config={
            "num_replicas": replicas,
            "max_ongoing_requests": 1_000,
            "request_router_config": RequestRouterConfig(request_router_class=PrefixCacheAffinityRouter),
        },
    )
    serve.start(http_options={"host": "127.0.0.1", "port": settings["port"]})
    serve.run(build_openai_app({"llm_configs": [config]}), blocking=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
