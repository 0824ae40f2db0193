"""The public names, for editors and type checkers."""

from mindformers_adaptive.gradients.layers import LayerOutputs as LayerOutputs
from mindformers_adaptive.gradients.ranges import GradientSweep as GradientSweep
from mindformers_adaptive.gradients.recommendation import LossScaleRecommendation as LossScaleRecommendation
from mindformers_adaptive.gradients.recommendation import Verdict as Verdict
from mindformers_adaptive.gradients.report import GradientRanges as GradientRanges
