"""Time of a decode step for each way of launching it, and time from an abort's signal to an idle device."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.gpu.abortable_steps import StepTimes, abortable_steps, fence_hooks, timed
from benchmarks.gpu.decode_layers import DecodeLayers
from benchmarks.gpu.results import Figures, spread

BURST_S, PAUSE_S = 3e-3, 7e-3  # a thread that holds Python's lock so long, and then sleeps
FENCES = (2, 4, 8)


def step_anatomy(device: str) -> Figures:
    rounds = 40 if device == "cuda" else 2
    layers = DecodeLayers(device)
    layers.step_as_whole_graph()
    layers.finish()
    whole = layers.hidden.clone()
    layers.step_in_pieces()
    layers.finish()
    in_pieces = layers.hidden.clone()
    scale = in_pieces.abs().max()
    found: Figures = {"whole_vs_pieces_max_difference": float((whole - in_pieces).abs().max() / scale)}
    equal = bool(in_pieces.isfinite().all())

    def in_pieces_behind_a_fence(ahead: int) -> Callable[[], StepTimes]:
        before, after = fence_hooks(device, ahead)
        return lambda: timed(lambda: layers.step_in_pieces(before, after), layers.finish)

    with abortable_steps(device, layers) as abortable:
        ways: dict[str, Callable[[], StepTimes]] = {
            "whole_graph": lambda: timed(layers.step_as_whole_graph, layers.finish),
            "pieces": lambda: timed(layers.step_in_pieces, layers.finish),
            **{f"pieces_fence_{ahead}": in_pieces_behind_a_fence(ahead) for ahead in FENCES},
            "pieces_unarmed": lambda: abortable.step(armed=False),
            "pieces_armed": abortable.step,
        }
        for condition, interval_s in (("", None), ("gil_switch_5ms_", 5e-3), ("gil_switch_0.5ms_", 5e-4)):
            with gil_bursts(interval_s):
                for name, step in ways.items():
                    for _ in range(2):
                        step()
                    taken = [step() for _ in range(rounds)]
                    found |= spread(f"{condition}{name}_step", [one.step_s for one in taken])
                    found |= spread(f"{condition}{name}_host", [one.host_s for one in taken])
                    if name != "whole_graph":
                        equal &= torch.equal(layers.hidden, in_pieces)
    found["equal"] = equal
    return found


@contextmanager
def gil_bursts(switch_interval_s: float | None) -> Iterator[None]:
    """Run a thread that holds the GIL in bursts, with this switch interval; None: no thread."""
    if switch_interval_s is None:
        yield
        return
    over, usual = threading.Event(), sys.getswitchinterval()

    def hold() -> None:
        while not over.wait(PAUSE_S):
            end = time.perf_counter() + BURST_S
            while time.perf_counter() < end:
                pass

    thread = threading.Thread(target=hold, name="gil-bursts")
    sys.setswitchinterval(switch_interval_s)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(usual)


def safepoints(device: str) -> Figures:
    """Measure aborts whose signal comes just after a layer's check, which is the worst moment."""
    rounds = 40 if device == "cuda" else 3
    layers = DecodeLayers(device, whole=False)
    with abortable_steps(device, layers) as abortable:
        for _ in range(3):
            abortable.step()
        unarmed = sorted(abortable.step(armed=False).step_s for _ in range(rounds))
        armed = [abortable.step().step_s for _ in range(rounds)]
        left = [abortable.step(leave_at=layers.layers // 2) for _ in range(rounds)]
        layers.step_in_pieces()
        layers.finish()
        expected = layers.hidden.clone()
        abortable.step()
    layer_s = unarmed[rounds // 2] / layers.layers
    since_signal = sorted(one.since_signal_s for one in left)
    return {
        "equal": all(one.aborted for one in left) and bool((layers.hidden == expected).all()),
        **spread("unarmed_step", unarmed),
        **spread("armed_step", armed),
        **spread("signal_to_idle", since_signal),
        "signal_to_idle_layers": since_signal[rounds // 2] / layer_s,
        "signal_to_idle_p90_layers": since_signal[int(rounds * 0.9)] / layer_s,
    }
