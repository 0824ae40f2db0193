"""The public names, for editors and type checkers."""

from mindformers_adaptive.amp.manager import AdaptiveLossScaleManager as AdaptiveLossScaleManager
from mindformers_adaptive.amp.manager import GradientGuidedLossScaleManager as GradientGuidedLossScaleManager
from mindformers_adaptive.amp.manager import RuleLossScaleManager as RuleLossScaleManager
from mindformers_adaptive.amp.scaler import AdaptiveLossScaler as AdaptiveLossScaler
from mindformers_adaptive.amp.scaler import GradientGuidedLossScaler as GradientGuidedLossScaler
from mindformers_adaptive.amp.scaler import RuleLossScaler as RuleLossScaler
from mindformers_adaptive.amp.simulated_formats import simulate_formats as simulate_formats
from mindformers_adaptive.amp.train_network import FixedScaleTrainOneStepCell as FixedScaleTrainOneStepCell
from mindformers_adaptive.amp.train_network import build_train_network as build_train_network
from mindformers_adaptive.amp.train_network import enable_loss_scale_on_cpu as enable_loss_scale_on_cpu
from mindformers_adaptive.cells.update_cells import (
    AdaptiveLossScaleUpdateCell as AdaptiveLossScaleUpdateCell,
)
from mindformers_adaptive.cells.update_cells import (
    GradientGuidedLossScaleUpdateCell as GradientGuidedLossScaleUpdateCell,
)
from mindformers_adaptive.cells.update_cells import RuleLossScaleUpdateCell as RuleLossScaleUpdateCell
from mindformers_adaptive.gradients.ranges import find_loss_scale as find_loss_scale
from mindformers_adaptive.gradients.ranges import gradient_ranges as gradient_ranges
from mindformers_adaptive.integration.registration import register as register
from mindformers_adaptive.integration.trainer import Trainer as Trainer
from mindformers_adaptive.lab.policies import make_policy as make_policy
from mindformers_adaptive.monitor.gradient_range_monitor import GradientRangeMonitor as GradientRangeMonitor
from mindformers_adaptive.monitor.loss_scale_monitor import LossScaleMonitor as LossScaleMonitor
from mindformers_adaptive.overflow.explain import explain_overflow as explain_overflow
from mindformers_adaptive.rules.adaptive import AdaptiveRule as AdaptiveRule
from mindformers_adaptive.rules.adaptive import LossScaleState as LossScaleState
from mindformers_adaptive.rules.guided import GuidedRule as GuidedRule
from mindformers_adaptive.rules.ladder import window_ladder as window_ladder
from mindformers_adaptive.rules.megatron import scale_sense_from_megatron as scale_sense_from_megatron
from mindformers_adaptive.rules.rule import Rule as Rule

__version__: str
