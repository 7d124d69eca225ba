"""Three answers to a shortage of KV: plain preemption, parking, and dropping parameters.

    python -m benchmarks.overload [--live] [--quick] [--load LOAD] [--json FILE]
    python -m benchmarks.overload --computed [--quick] [--json FILE]

`preempt` is plain vLLM without an admission gate: running turns are computed again, and idle KV is lost.
`park` moves both to the host. `drop` also drops duplicated parameters (placement/overload/). Live bursts run
on vLLM's CPU build, on plain engines and on two fleets. Computed ones run on the simulator's clock with the
KunServe paper's set-ups, and add `pipeline always`, pairs by configuration, and `KV without limit`, the bound
of any policy about memory. docs/measurements/overload.md has the tables and their meaning.
"""

from dataclasses import asdict

from benchmarks.harness.output import command, print_figures, print_rows, write_json
from benchmarks.overload import computed, live
from benchmarks.overload.setups import A800, H800, SET_UPS


def main() -> None:
    parser = command(__doc__, quick="live: one round; computed: two set-ups")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--computed", action="store_true", help="on the simulator's clock")
    how.add_argument("--live", action="store_true", help="on this machine, which is the default")
    parser.add_argument("--load", action="append", choices=list(live.LOADS), help="live: only this load")
    options = parser.parse_args()
    if not options.computed:
        loads = [load for load in live.LOADS if load in (options.load or live.LOADS)]
        figures, table = live.measure(loads, options.quick)
        print_rows(
            "by load and policy",
            ({"load": name, **row} for name, row in table.items() if ", " in name),
        )
        print_figures(figures)
        write_json(options.json, figures | {"table": table})
        return
    set_ups = SET_UPS[2::2] if options.quick else SET_UPS
    rows = computed.table(set_ups)
    print_rows("by set-up and policy", rows)
    figures = computed.headlines(rows, {one.name for one in set_ups if one.paper})
    print_figures(figures)
    profiles = {cluster.name: asdict(cluster.profile()) for cluster in (A800, H800)}
    tables = {"set_ups": [asdict(row) for row in rows]}
    write_json(options.json, figures | {"tables": tables, "profiles": profiles})


if __name__ == "__main__":
    main()
