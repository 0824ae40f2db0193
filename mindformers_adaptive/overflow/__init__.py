"""Why a training overflows: the layer, the operator, and what helps."""
