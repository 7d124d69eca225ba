"""Registry of in-engine policies by name."""

from placement import PlacementError
from placement.scheduling.baselines.bros import Bros
from placement.scheduling.baselines.reference_policies import NonPreemptive, OnlineOnly, Sarathi
from placement.scheduling.conserve import Conserve
from placement.scheduling.interface import ServingPolicy, ServingSettings
from placement.scheduling.prompts_in_order import PromptsInOrder


class UnknownPolicyError(PlacementError, ValueError):
    """Error: no in-engine policy has the requested name."""


POLICIES: dict[str, type[ServingPolicy]] = {
    "bros": Bros,
    "conserve": Conserve,
    "non_preemptive": NonPreemptive,
    "online_only": OnlineOnly,
    "prompts_in_order": PromptsInOrder,
    "sarathi": Sarathi,
}


def make_policy(settings: ServingSettings) -> ServingPolicy:
    try:
        return POLICIES[settings.policy.replace("-", "_")](settings)
    except KeyError:
        raise UnknownPolicyError(
            f"no in-engine policy is called {settings.policy!r}; choose one of {', '.join(POLICIES)}"
        ) from None
