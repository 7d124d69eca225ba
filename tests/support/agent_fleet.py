"""Fleet for tests of coding agents: long prompts fit, and the model gives replies that prompts contain."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from safetensors.numpy import save_file

from deploy.models import smollm2
from deploy.small_model import ModelShape, make_weights
from tests.support.fleet import RunningFleet, fleet_up

CONTEXT = 65_536
VOCABULARY_OF_BYTES = ModelShape().vocabulary
SHAPE = ModelShape(
    layers=2,
    hidden=128,
    heads=2,
    kv_heads=1,
    intermediate=256,
    max_context=CONTEXT,
    merges=int(smollm2.CONFIG["vocab_size"]) - VOCABULARY_OF_BYTES,  # type: ignore[call-overload]
)


def make_model(directory: Path) -> None:
    """Write a small random model with the tokenizer and the chat template of SmolLM2."""
    source = smollm2.ensure(print)
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(source / name, directory / name)
    ends = {name: smollm2.CONFIG[name] for name in ("eos_token_id", "pad_token_id")}
    config = {**SHAPE.hugging_face_config(), **ends}
    (directory / "config.json").write_bytes(orjson.dumps(config))
    save_file(make_weights(SHAPE), directory / "model.safetensors", metadata={"format": "pt"})


@contextmanager
def agent_fleet(directory: Path) -> Iterator[RunningFleet]:
    """Start one prefiller and one decoder whose model is made in `directory`."""
    make_model(directory)

    def edit(content: Any) -> None:
        content["name"] = "agents"
        content["model"] |= {"path": str(directory), "max_context": CONTEXT}
        args = content["engine"]["args"]
        for name in ("tool-strict-level", "structured-outputs-config"):  # a scripted model needs no grammar
            del args[name]
        args["logits-processors"] = "tests.support.scripted_replies:ScriptedReplies"
        content["tiers"][1]["replicas"] = 1
        content["conversation"]["prefiller_wait"] = "2m"

    with fleet_up("random", edit) as fleet:
        yield fleet
