"""A scheduler whose policy changes while it runs: policies are compared on one engine, in turns."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from placement.correcting import SelfCorrecting
from placement.latency import LatencyModel
from placement.serving import ServingSettings, make_policy
from placement.serving.state import Slo
from workers.coserving.scheduler import CoServingScheduler

SCHEDULER = "benchmarks.coserving_switch.SwitchingScheduler"
VARIABLE = "CONSERVE_BENCHMARK_POLICY"


def choose(path: Path, settings: ServingSettings, model: LatencyModel) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({"settings": asdict(settings), "model": asdict(model)}))
    beside.replace(path)


class SwitchingScheduler(CoServingScheduler):
    """Reads its settings anew whenever the file named in the environment is replaced."""

    _chosen_at = 0

    def schedule(self, throttle_prefills: bool = False) -> Any:
        path = os.environ[VARIABLE]
        changed = os.stat(path).st_ino
        if changed != self._chosen_at:
            self._chosen_at = changed
            chosen = json.loads(Path(path).read_text())
            values = chosen["settings"]
            settings = ServingSettings(**{**values, "slo": Slo(**values["slo"])})
            # Each turn starts from the profile: none has what another's iterations have taught the model.
            self._latency = SelfCorrecting(LatencyModel(**chosen["model"]))
            self._policy = make_policy(settings)
            self._rows.default_slo = settings.slo
            if self._watch is not None:
                self._watch.policy = self._policy
        return super().schedule(throttle_prefills)
