"""Sequences of overflows with the loss scales that the systems' own test suites state for them.

"." is a clean step and "!" an overflow; the scales are those after each step. Where a suite states only some of them,
the row says so and has None for the others.
"""

LARGEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127

TENSORFLOW = "tensorflow: python/training/experimental/loss_scale_test.py::DynamicLossScaleTest::"
CONTRIB = (
    "tensorflow: contrib/mixed_precision/python/loss_scale_manager_test.py::ExponentialUpdateLossScaleManagerTest::"
)
DEEPSPEED = "DeepSpeed: tests/unit/runtime/half_precision/test_dynamic_loss_scale.py::"
JMP = "jmp: jmp/_src/loss_scale_test.py::LossScaleTest::"
PADDLE = "Paddle: test/legacy_test/test_update_loss_scaling_op.py::"
KERAS2 = "keras 2: mixed_precision/loss_scale_optimizer_test.py::LossScaleOptimizerTest::"
MINDSPORE = "mindspore: tests/st/mix_precision/test_mix_precision_func.py::"


def tensorflow(scale, period=2, multiplier=2):
    return {"initial_loss_scale": scale, "increment_period": period, "multiplier": multiplier}


def contrib(scale, increase_every=2, decrease_every=2):
    return {
        "init_loss_scale": scale,
        "incr_every_n_steps": increase_every,
        "decr_every_n_nan_or_inf": decrease_every,
        "incr_ratio": 2,
        "decr_ratio": 0.5,
    }


def deepspeed(scale, **others):
    return {"init_scale": scale, "scale_window": 2, **others}


QUARTER, CONTRIB_QUARTER = LARGEST_FLOAT32 / 4, LARGEST_FLOAT32 / 4 + 10

# Each row: policy, parameters, steps, scales, where it stands.
PEER_SEQUENCES = [
    (
        "tensorflow",
        tensorflow(QUARTER),
        "......",
        [QUARTER, QUARTER * 2, QUARTER * 2] + [LARGEST_FLOAT32] * 3,
        TENSORFLOW + "test_keep_increasing_until_capped",
    ),
    ("tensorflow", tensorflow(1024), "!!!!!!", [512, 256, 128, 64, 32, 16], TENSORFLOW + "test_decrease_every_step"),
    ("tensorflow", tensorflow(1), "...!.", [1, 2, 2, 1, 1], TENSORFLOW + "test_nan_clear_good_step"),
    (
        "tensorflow",
        tensorflow(1, period=1),
        "...!..",
        [2, 4, 8, 4, 8, 16],
        TENSORFLOW + "test_trigger_loss_scale_update_each_step",
    ),
    (
        "tensorflow",
        tensorflow(32),
        ".!.!.!.",
        [32, 16, 16, 8, 8, 4, 4],
        TENSORFLOW + "test_alternating_good_and_bad_gradients_trigger_every_other_step",
    ),
    (
        "tensorflow",
        tensorflow(4, multiplier=3),
        "..!..",
        [4, 12, 4, 4, 12],
        TENSORFLOW + "test_nondefault_multiplier",
    ),
    (
        "tensorflow_contrib",
        contrib(CONTRIB_QUARTER),
        "......",
        [CONTRIB_QUARTER, CONTRIB_QUARTER * 2, CONTRIB_QUARTER * 2] + [LARGEST_FLOAT32] * 3,
        CONTRIB + "test_keep_increasing_until_capped",
    ),
    (
        "tensorflow_contrib",
        contrib(1024),
        "!!!!!!",
        [1024, 512, 512, 256, 256, 128],
        CONTRIB + "test_decrease_every_n_steps",
    ),
    ("tensorflow_contrib", contrib(1), "...!.", [1, 2, 2, 2, 2], CONTRIB + "test_incr_bad_step_clear_good_step"),
    (
        "tensorflow_contrib",
        contrib(1),
        "...!.!",
        [1, 2, 2, 2, 2, 1],
        CONTRIB + "test_incr_good_step_does_not_clear_bad_step",
    ),
    (
        "tensorflow_contrib",
        contrib(1, increase_every=1, decrease_every=1),
        ".!.!.!.!.",
        [2, 1, 2, 1, 2, 1, 2, 1, 2],
        CONTRIB + "test_alternating_good_and_bad_gradients_trigger_each_step",
    ),
    (
        "tensorflow_contrib",
        contrib(32, decrease_every=1),
        ".!.!.!.",
        [32, 16, 16, 8, 8, 4, 4],
        CONTRIB + "test_alternating_good_and_bad_gradients_trigger_incr_every_2steps",
    ),
    (
        "deepspeed_fused",
        deepspeed(16.0),
        "!!!!!!!!",
        [8, 4, 2, 1, 1, 1, 1, 1],
        DEEPSPEED + "TestFused::test_all_overflow",
    ),
    (
        "deepspeed_unfused",
        deepspeed(16.0, min_scale=0.25),
        "!!!!!!!!",
        [8, 4, 2, 1, 0.5, 0.25, 0.25, 0.25],
        DEEPSPEED + "TestUnfused::test_all_overflow",
    ),
    # States the scales after the second, the fifth and the sixth step.
    (
        "deepspeed_fused",
        deepspeed(256.0),
        "!!...!",
        [None, 64, None, None, 128, 64],
        DEEPSPEED + "TestFused::test_some_overflow",
    ),
    (
        "deepspeed_unfused",
        deepspeed(256.0),
        "!!...!",
        [None, 64, None, None, 128, 64],
        DEEPSPEED + "TestUnfused::test_some_overflow",
    ),
    (
        "jmp",
        {"loss_scale": 10, "period": 30, "factor": 3},
        "." * 30,
        [10] * 29 + [30],
        JMP + "test_dynamic_loss_scale_adjust_increases_on_finite",
    ),
    (
        "jmp",
        {"loss_scale": 10, "period": 20, "factor": 2},
        "!" * 100,
        [5, 2.5, 1.25] + [1] * 97,
        JMP + "test_dynamic_loss_scale_adjust_reduce_on_non_finite",
    ),
    (
        "jmp",
        {"loss_scale": 10, "period": 20, "factor": 2, "min_loss_scale": 0.3125},
        "!" * 100,
        [5, 2.5, 1.25, 0.625] + [0.3125] * 96,
        JMP + "test_dynamic_loss_scale_explicit_min_loss_scale",
    ),
    (
        "keras",
        {"initial_scale": 2.0, "dynamic_growth_steps": 2},
        "." * 8,
        [None] * 7 + [32],
        "keras 3: src/optimizers/loss_scale_optimizer_test.py::LossScaleOptimizerTest::test_upscaling",
    ),
    (
        "keras2",
        {"initial_scale": 2, "dynamic_growth_steps": 1},
        "..!",
        [4, 8, 4],
        KERAS2 + "testClipping",
    ),
    (
        "keras2",
        {"initial_scale": 2, "dynamic_growth_steps": 2},
        "!",
        [1],
        KERAS2 + "testCustomAggregater",
    ),
    # Its expectation is 2048 times 0.8 in float32.
    (
        "paddle",
        {
            "init_loss_scaling": 2048,
            "incr_every_n_steps": 1000,
            "decr_every_n_nan_or_inf": 2,
            "incr_ratio": 2.0,
            "decr_ratio": 0.8,
            "initial_good_steps": 999,
            "initial_bad_steps": 1,
        },
        "!",
        [1638.4000244140625],
        PADDLE + "TestUpdateLossScalingOpBad",
    ),
    (
        "dynamic_scaler",
        {"scale_value": 2**10, "scale_factor": 2, "scale_window": 50},
        ".",
        [1024],
        MINDSPORE + "test_dynamic_loss_scaler, its second half",
    ),
]
