"""Bytes after an aborted step: of a block that is being loaded, and of input on its way to the device."""

from itertools import product

import torch

from benchmarks.gpu.abortable_steps import AbortableSteps, abortable_steps
from benchmarks.gpu.decode_layers import DecodeLayers
from benchmarks.gpu.host_tier_copies import made_blocks
from benchmarks.gpu.results import Figures
from kvtransfer.checkpoint.copy_orders import BlockCopy
from kvtransfer.checkpoint.cuda_mover import CudaMover, memory_for
from kvtransfer.side_stream import cuda_of

INPUT_BYTES = {"64B": 64, "64KiB": 64 << 10}
LEAVE_AT = (0, 1, 2)
BEFORE = IDLE, AFTER_ABORT, AFTER_WHOLE = "idle", "after_aborted_step", "behind_whole_step"


def aborted_steps(device: str) -> Figures:
    decode = DecodeLayers(device)
    found = load_after_abort(device, decode) | abort_inputs(device, decode)
    found["equal"] = all(value for name, value in found.items() if name.endswith("_equal"))
    return found


def load_after_abort(device: str, decode: DecodeLayers) -> Figures:
    """Check that a load waits for the kernels of an aborted step that still write to its block."""
    rounds = 10 if device == "cuda" else 2
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
        mover = CudaMover(layers, cuda_of(kv))  # without a mark
    memory.close()
    return {
        "load_after_abort_equal": right == rounds,
        "load_after_abort_rounds": rounds,
        "load_after_abort_without_mark_wrong": overtaken,  # more than none on a GPU: the hazard is real
    }


def abort_inputs(device: str, decode: DecodeLayers) -> Figures:
    """Overwrite pinned input right after an abort, and count the steps in which the device saw the new bytes.

    A step copies its input, clones what arrived, and is aborted at the first layers. Before it the device has
    nothing to do, the last layers of an aborted step, or a whole step: that no engine has, and it shows that
    later bytes are seen at all.
    """
    rounds = 20 if device == "cuda" else 2
    found: Figures = {"abort_inputs_rounds": rounds, "abort_inputs_synchronised_equal": True}
    with abortable_steps(device, decode) as steps:
        steps.step()

        def saw_its_input(nbytes: int, leave_at: int, before: str, synchronised: bool) -> bool:
            pinned = torch.full((nbytes,), 1, dtype=torch.uint8, pin_memory=device == "cuda")
            arrived = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            decode.finish()
            work_before(before, steps, decode)
            arrived.copy_(pinned, non_blocking=True)
            seen = arrived.clone()
            left = steps.step(leave_at=leave_at, wait=False)
            if synchronised:
                decode.finish()
            pinned.numpy()[:] = 2
            decode.finish()
            return left.aborted and bool((seen == 1).all())

        cases = product(INPUT_BYTES.items(), LEAVE_AT, BEFORE, (False, True))
        for (size_name, nbytes), leave_at, before, synchronised in cases:
            wrong = sum(not saw_its_input(nbytes, leave_at, before, synchronised) for _ in range(rounds))
            way = "synchronised" if synchronised else "unsynchronised"
            found[f"abort_at_{leave_at}_{size_name}_{before}_{way}_wrong"] = wrong
            found["abort_inputs_synchronised_equal"] &= not (synchronised and wrong)
    return found


def work_before(kind: str, steps: AbortableSteps, decode: DecodeLayers) -> None:
    """Launch the work that the device still has to do when a step begins."""
    if kind == AFTER_ABORT:
        steps.step(leave_at=decode.layers // 2, wait=False)
    elif kind == AFTER_WHOLE:
        decode.step_as_whole_graph()
