"""conserve profile FILE TIER: measure a tier's engine and keep the latency model that fits it."""

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deploy.fleet import load_fleet
from deploy.fleet.schema import SMALL_MODEL, FleetSpec, TierSpec
from deploy.home import PROFILES, conserve_home
from deploy.small_model import ModelShape, make_model
from placement.fleet.prefillers import curve_of
from placement.iteration.latency import Sample
from workers.profiles import Profile, ProfileKey, ProfileStore

app = typer.Typer()
console = Console()
CHECK_SECONDS = 2e-7  # of one look at the flag (benchmarks.coserving measures it)


def store_path() -> Path:
    return conserve_home() / PROFILES


@app.command()
def profile(
    file: Annotated[Path, typer.Argument(help="a fleet file")],
    tier: Annotated[str, typer.Argument(help="name of a tier; its engine is started here, alone")],
    repeats: Annotated[int, typer.Option(help="times every shape of iteration is provoked", min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="profile store; by default that of $CONSERVE_HOME")] = None,
    picture: Annotated[Path | None, typer.Option(help="also draw predicted against measured (PNG)")] = None,
) -> None:
    """Measure iterations of many shapes, fit the latency model, show its error by region, and store it."""
    fleet = load_fleet(file)
    chosen = next((one for one in fleet.tiers if one.name == tier), None)
    if chosen is None:
        names = ", ".join(one.name for one in fleet.tiers)
        raise typer.BadParameter(f"no tier is called {tier!r}; {file} has {names}", param_hint="TIER")
    key, found, samples, chunk = asyncio.run(_measure(fleet, chosen, repeats))
    path = out or store_path()
    ProfileStore(path).save(key, found)
    show(key, found, chunk)
    console.print(f"stored in {path}")
    if picture:
        draw(found, samples, picture)
        console.print(f"drawn in {picture}")


async def _measure(
    fleet: FleetSpec, tier: TierSpec, repeats: int
) -> tuple[ProfileKey, Profile, list[Sample], int]:
    from workers.coserving import profile as profiling
    from workers.coserving.config import CoServingConfig, key_of
    from workers.coserving.profile import StandaloneShape, coserving_engine

    arguments = {name.replace("-", "_"): value for name, value in {**fleet.engine.args, **tier.args}.items()}
    max_tokens = int(arguments.pop("max_num_batched_tokens", 2048))
    max_requests = int(arguments.pop("max_num_seqs", 64))
    max_context = fleet.model.max_context or 8192
    block = int(arguments.pop("block_size", 32))
    if fleet.model.dtype != "auto":
        arguments["dtype"] = fleet.model.dtype
    shape = StandaloneShape(
        _model(fleet), blocks=arguments.pop("num_gpu_blocks_override", None), block_tokens=block,
        max_tokens=max_tokens, max_running=max_requests, max_context=max_context,
        compiled=not arguments.pop("enforce_eager", False),
        ranks=int(arguments.pop("tensor_parallel_size", 1)),
        environment={**_threads(fleet), **fleet.engine.env, **tier.env}, arguments=arguments,
    )  # fmt: skip
    async with coserving_engine(shape, CoServingConfig()) as engine:
        grid = profiling.Grid(max_tokens, min(max_context, 4 * max_tokens), max_requests, block, repeats)
        samples = await profiling.measure(engine, grid)
        key = key_of(engine.llm.model_config.model)
        layers = engine.llm.model_config.hf_text_config.num_hidden_layers
    return key, profiling.profile_of(samples, layers, time.time()), samples, max_tokens


def _threads(fleet: FleetSpec) -> dict[str, str]:
    """As the fleet's engines are bound: the profile is of so many threads."""
    if fleet.engine.threads is None:
        return {}
    return {"OMP_NUM_THREADS": str(fleet.engine.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def _model(fleet: FleetSpec) -> Any:
    if fleet.model.path != SMALL_MODEL:
        return fleet.model.path
    out = store_path().parent / "profiled-model"
    make_model(out, ModelShape())
    return out


def draw(profile: Profile, samples: list[Sample], path: Path) -> None:
    """Predicted against measured, one dot a shape."""
    from traces import charts  # matplotlib: no other command should wait for it

    measured = [sample.seconds * 1e3 for sample in samples]
    predicted = [profile.model.seconds(sample.work) * 1e3 for sample in samples]
    figure, (axes,) = charts.panels(1)
    axes.scatter(measured, predicted, s=18, color=charts.COLOURS[0])
    ends = [min(measured) * 0.8, max(measured) * 1.25]
    axes.plot(ends, ends, linewidth=1, color=charts.COLOURS[1])
    axes.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms", xlim=ends, ylim=ends)
    charts.save(figure, path)


def show(key: ProfileKey, found: Profile, chunk_tokens: int) -> None:
    from workers.coserving.profile import safepoint_every

    table = Table(title=f"{key}")
    for column in ("iterations", "shapes", "median error", "p90", "worst"):
        table.add_column(column, justify="right")
    for region in found.errors:
        percents = (f"{value:.1%}" for value in (region.median, region.p90, region.worst))
        table.add_row(region.region, str(region.samples), *percents)
    console.print(table)
    model = found.model
    console.print(
        f"seconds = {model.per_token:.3g} new + {model.per_attended:.3g} attended "
        f"+ {model.per_before:.3g} before + {model.per_context:.3g} context "
        f"+ {model.per_request:.3g} requests + {model.constant:.3g}"
    )
    console.print(
        f"a layer takes up to {found.layer_seconds * 1e3:.2f} ms; a safepoint every "
        f"{safepoint_every(found.layer_seconds, CHECK_SECONDS, 1 << 10)} layers costs at most 0.5 %"
    )
    curve = curve_of(model, chunk_tokens)
    console.print(
        "in the fleet file, if the tier prefills: "
        f"prefill_curve: {{a: {curve.a:.3g}, b: {curve.b:.3g}, c: {curve.c:.3g}}}"
    )
