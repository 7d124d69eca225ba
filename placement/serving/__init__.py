"""Policies inside an engine: which rows an iteration serves, with how many tokens, at whose expense."""

from placement.serving import policy
from placement.serving.baselines import NonPreemptive, OnlineOnly, RoundRobin, Sarathi
from placement.serving.bros import Bros
from placement.serving.conserve import Conserve
from placement.serving.policy import ServingPolicy, ServingSettings, make_policy, policy_names

policy.register("conserve", Conserve)
policy.register("bros", Bros)
policy.register("online_only", OnlineOnly)
policy.register("non_preemptive", NonPreemptive)
policy.register("sarathi", Sarathi)
policy.register("round_robin", RoundRobin)

__all__ = ["ServingPolicy", "ServingSettings", "make_policy", "policy_names"]
