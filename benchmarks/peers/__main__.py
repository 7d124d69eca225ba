"""How our fleets compare with other routers over real vLLM, with the same engines and client, in one run.

    python -m benchmarks.peers --peers DIR [--loads 0.5,0.8,1.0,1.5,2.0] [--rounds 3] [--quick] [--json FILE]

Loads are shares of plain vLLM's capacity on this machine, which is measured first, for each trace: every
installed router over plain engines serves all conversations at once, and the router with the most tokens per
second is the best of that trace. Then `ours` and the best routers, or the contenders of --only, play each
trace at each load, one after another. A contender is started anew for each trace and plays all loads; each
trace and round begins with another contender.

Peers come from --peers DIR (or $CONSERVE_PEERS), an environment each, as requirements/peers.txt says. A peer
that is not installed or does not run is named with the reason, and left out from then on. If our fleet does
not finish a play, the conversations of its remaining loads count as `failed`, and it plays the next trace.

With --profile, engines log each iteration, and a table shows what each engine spends its time on in each
play. Logging slows engines down a little: take the other figures from a run without --profile.

--quick is one round of one trace at 0.8 and 1.5 against the first router, and ends within ten minutes.
"""

import argparse
import os
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness.engines import PlainEngines
from benchmarks.harness.fleet import RANDOM
from benchmarks.harness.output import command, named_rows, print_rows, report
from benchmarks.peers import cpu, engine_probe, figures, loads
from benchmarks.peers.contenders import contenders
from benchmarks.peers.figures import OURS
from benchmarks.peers.peer_run import PeerRun, prepared
from benchmarks.peers.profile import IterationCost

LOADS, QUICK_LOADS = "0.5,0.8,1.0,1.5,2.0", "0.8,1.5"
START_LIMIT_S, PLAY_LIMIT_S = 600.0, 600.0
QUICK_START_S, QUICK_PLAY_S, QUICK_S = 240.0, 90.0, 570.0


def main() -> None:
    parser = command(__doc__, "one round, one trace, two loads, fewer conversations", RANDOM)
    parser.add_argument("--peers", type=Path, default=os.environ.get("CONSERVE_PEERS"))
    parser.add_argument("--loads", type=shares, help=f"shares of the capacity (default: {LOADS})")
    parser.add_argument(
        "--traces", help=f"{', '.join(loads.NAMES)} or files, separated by commas (default: real,mix)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="these contenders, separated by semicolons")
    parser.add_argument("--profile", action="store_true", help="also report what engines spend their time on")
    options = parser.parse_args()
    cpu.mark()
    quick, rounds = options.quick, 1 if options.quick else options.rounds
    ends_at = time.monotonic() + (QUICK_S if quick else float("inf"))
    names = (options.traces or ("real" if quick else "real,mix")).split(",")
    peers = Path(options.peers) if options.peers else None
    start_limit_s = QUICK_START_S if quick else START_LIMIT_S
    with prepared(options.fleet, peers, start_limit_s, options.profile) as bench:
        run = PeerRun(
            loads.traces(names, quick),
            options.loads or shares(QUICK_LOADS if quick else LOADS),
            bench.fleet.model.name,
            QUICK_PLAY_S if quick else PLAY_LIMIT_S,
            ends_at,
            probe=bench.work / engine_probe.EVENTS if options.profile else None,
        )
        with PlainEngines(bench) as plain:
            everyone = contenders(bench, plain)
            known = [one.name for one in everyone]
            wanted = [name.strip() for name in options.only.split(";") if name.strip()]
            if unknown := set(wanted) - set(known):
                parser.error(
                    f"--only: no contender is called {', '.join(unknown)}: there are {'; '.join(known)}"
                )
            routers = [one for one in everyone if one.over_plain and (not wanted or one.name in wanted)]
            routers = routers or [one for one in everyone if one.over_plain]
            best = run.measure_capacity(routers[:1] if quick else routers)
            wanted = wanted or [OURS, *best.values()]
            for number in range(rounds):
                run.round(number, [one for one in everyone if one.name in wanted])
    table, found = figures.medians(run.rows), figures.named(run.rows, run.lost)
    for play, rows in table.items():
        print_rows(play, named_rows("contender", rows))
    variants = {
        name: figures.named(run.rows, ours=name)
        for name in dict.fromkeys(one.contender for one in run.rows if not one.peer and one.contender != OURS)
    }
    for name, ratios in variants.items():
        print_rows(name, named_rows("figure", {figure: {"worst": value} for figure, value in ratios.items()}))
    if options.profile:
        print_rows("What engines spend their time on", run.profiles, width=240)
        print_rows("Processor time of an iteration", named_rows("contender", _milliseconds(run.costs)))
    print("\n".join(f"left out: {name}: {why}" for name, why in run.skipped.items()))
    report(
        options.json,
        found,
        failures=figures.failures(table, run.lost),
        left_out=run.skipped,
        best_routers=best,
        capacity=run.capacities,
        by_play=figures.by_round(run.rows),
        variants=variants,
        profile=run.profiles,
        iteration_cost=run.costs,
        table=table,
        rows=run.rows,
    )


def _milliseconds(costs: Mapping[str, IterationCost]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "constant_ms": cost.constant_s * 1e3,
            "decode_ms": cost.decode_s * 1e3,
            "1000_prompt_tokens_ms": cost.prompt_token_s * 1e6,
        }
        for name, cost in costs.items()
    }


def shares(text: str) -> tuple[float, ...]:
    """Return the loads in a comma-separated list; raise an error for argparse if the list is wrong."""
    try:
        found = tuple(float(one) for one in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected shares like {LOADS}, not {text!r}") from error
    if min(found) <= 0:
        raise argparse.ArgumentTypeError(f"a load is above 0, not {min(found):g}")
    return found


if __name__ == "__main__":
    main()
