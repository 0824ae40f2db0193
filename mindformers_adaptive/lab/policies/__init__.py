"""Loss-scaling policies to replay: the adaptive rule, and those of other systems, each under its own names."""

from mindformers_adaptive.lab.policies.factory import POLICY_NAMES, Policy, make_policy

__all__ = ["POLICY_NAMES", "Policy", "make_policy"]
