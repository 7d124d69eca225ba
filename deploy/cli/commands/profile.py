"""conserve profile FILE TIER: measure a tier's engine and keep the latency model that fits it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deploy.cli.common import FleetFile
from deploy.fleet import load_fleet
from deploy.fleet.components import EngineName, engine_spec, power_settings
from deploy.fleet.engine_arguments import parallel
from deploy.fleet.schema import FleetSpec, TierSpec
from deploy.home import FleetHome
from deploy.models.built_in import ensure_model
from placement.scheduling.latency_model import Sample
from placement.scheduling.prefill_curve import curve_of
from workers.power.engine_power import EnginePower, visible_gpus
from workers.power.nvml import PowerError
from workers.profiles import Profile, ProfileKey, ProfileStore

console = Console()
CHECK_SECONDS = 2e-7  # time of one check of the safepoint flag (benchmarks.coserving measures it)


def profile(
    file: FleetFile,
    tier: Annotated[str, typer.Argument(help="Name of a tier; one engine of it is started here")],
    repeats: Annotated[int, typer.Option(help="Number of measurements of each shape", min=1)] = 3,
    out: Annotated[
        Path | None, typer.Option(help="File of profiles; by default the one that engines of the fleet read")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Also draw predicted against measured times (PNG)")
    ] = None,
) -> None:
    """Measure iterations of many shapes, fit the latency model to them, show its errors, and store it."""
    fleet = load_fleet(file)
    chosen = next((one for one in fleet.tiers if one.name == tier), None)
    if chosen is None:
        names = ", ".join(one.name for one in fleet.tiers)
        raise typer.BadParameter(f"no tier is called {tier!r}; {file} has {names}", param_hint="TIER")
    home = FleetHome.of(fleet.name)
    key, found, samples, chunk = asyncio.run(_measure(fleet, chosen, home, repeats))
    path = out or home.profiles
    store = ProfileStore(path)
    former_at = store.measured_at(key)
    store.save(key, found)
    show(key, found, chunk)
    console.print(f"stored in {path}{_instead_of(former_at)}")
    if picture:
        draw(found, samples, picture)
        console.print(f"drawn in {picture}")


def _instead_of(former_at: float | None) -> str:
    if former_at is None:
        return ""
    return f", instead of what was measured on {time.strftime('%Y-%m-%d %H:%M', time.localtime(former_at))}"


async def _measure(
    fleet: FleetSpec, tier: TierSpec, home: FleetHome, repeats: int
) -> tuple[ProfileKey, Profile, list[Sample], int]:
    from workers.engine.coserving import profile as profiling
    from workers.engine.coserving.starting_model import key_of

    home.root.mkdir(parents=True, exist_ok=True)
    ensure_model(fleet, home)
    engine = EngineName(f"{tier.name}-profiled", tier)
    spec = engine_spec(fleet, engine, home, "127.0.0.1")
    async with under_cap(fleet, engine, home), profiling.launched_engine(spec) as running:
        grid = profiling.grid_of(running, repeats)
        samples = await profiling.measure(running, grid)
        key = key_of(running.llm.vllm_config, tier.power_cap_w)
        layers = running.llm.model_config.hf_text_config.num_hidden_layers
    return key, profiling.profile_of(samples, layers, time.time()), samples, grid.max_tokens


@asynccontextmanager
async def under_cap(fleet: FleetSpec, engine: EngineName, home: FleetHome) -> AsyncIterator[None]:
    """Cap the power of as many GPUs of this machine as an engine uses, while in this context."""
    ranks = parallel(fleet, engine.tier).gpus
    gpus = visible_gpus() or tuple(str(index) for index in range(ranks))
    async with EnginePower(power_settings(fleet, engine, home, gpus[:ranks])) as power:
        cap = engine.tier.power_cap_w
        if cap is not None and not power.capped:
            raise PowerError(
                f"the cap of {cap:g} W could not be set (it takes root, or nvidia-smi -pl beforehand): "
                "without it, the profile would be of other clocks than this tier has"
            )
        yield


def draw(profile: Profile, samples: list[Sample], path: Path) -> None:
    """Draw the profile's predicted times against the measured ones, a dot for each sample."""
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
    from workers.engine.coserving.profile import safepoint_every

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
        f"a prompt of n tokens alone: {curve.a:.3g} + {curve.b:.3g} n + {curve.c:.3g} n² seconds, "
        "which its engines report"
    )
