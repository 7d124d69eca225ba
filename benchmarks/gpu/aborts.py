"""Steps that measure how long an abort takes, and check a block that is loaded after an abort."""

import torch

from benchmarks.gpu.abortable_steps import abortable_steps
from benchmarks.gpu.decode_layers import DecodeLayers
from benchmarks.gpu.host_tier_copies import made_blocks
from benchmarks.gpu.results import Figures, spread
from kvtransfer.checkpoint.copy_orders import BlockCopy
from kvtransfer.checkpoint.cuda_mover import CudaMover, memory_for
from kvtransfer.side_stream import cuda_of


def safepoints(device: str) -> Figures:
    """Measure how long an abort takes if its signal comes just after a layer's check, the worst moment."""
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


def aborted_steps(device: str) -> Figures:
    """Check that a load waits for the kernels of an aborted step that still write to its block."""
    rounds = 10 if device == "cuda" else 2
    decode = DecodeLayers(device)
    kv = made_blocks(device, 4, 16, 64 << 10)
    layers = list(kv.unbind())
    wanted = kv[:, 1].clone()
    mover, memory = CudaMover(layers, cuda_of(kv)), memory_for(layers, 1)
    mover.store(memory, [BlockCopy(1, slot=0, generation=1)])
    back = [BlockCopy(5, slot=0, generation=1)]
    right = overtaken = 0
    for _ in range(rounds):
        for marked in (False, True):
            decode.step_as_whole_graph()
            kv[:, 5] = 7
            if marked:
                mover.mark()
            known = mover.load(memory, back) == back
            decode.finish()
            equal = known and torch.equal(kv[:, 5], wanted)
            right += marked and equal
            overtaken += not marked and not equal
        mover = CudaMover(layers, cuda_of(kv))  # its loads wait for no kernel, because nothing calls `mark`
    memory.close()
    return {
        "equal": right == rounds,
        "load_after_abort_rounds": rounds,
        "load_after_abort_without_mark_wrong": overtaken,  # above 0 on a GPU: the hazard is real
    }
