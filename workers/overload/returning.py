"""Parameters on their way back beside serving: a thread that brings dropped layers from their copies on the
host, one behind the other, while the engine's batches still go through its peers."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from workers.overload.memory import LayerWeights

logger = logging.getLogger("conserve.workers.overload")


class ReturningWeights:
    def __init__(self, weights: LayerWeights, layers: Sequence[int], then: Callable[[float], None]) -> None:
        """`then`: in the thread, once they are here, with when this began."""
        self._weights, self._layers, self._then = weights, layers, then
        self._began = time.monotonic()
        self._stopped, self._done = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="overload-returning", daemon=True).start()

    def stop(self) -> None:
        """From now on it touches no memory. What is missing is somebody else's to bring."""
        self._stopped.set()
        self._done.wait()  # for one layer's copy at most

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._bring()
        except Exception:  # the last step of the restore brings what is missing
            logger.exception("parameters do not come back beside serving")
        finally:
            self._done.set()
        if not self._stopped.is_set():
            self._then(self._began)

    def _bring(self) -> None:
        for layer in self._layers:
            if self._stopped.is_set():
                return
            if not self._weights.bring_back(layer):  # of uneven parts: the longer one has pages for some only
                logger.info("layer %d and those behind it come back with the last step: no free pages", layer)
                return
