"""MindFormers' Trainer with TrainingArguments: adaptive loss scaling by its name.

python scripts/examples/mindformers_trainer.py
"""

from mindformers import ContextConfig, TrainingArguments, init_context
from tiny_llama import (
    BATCH_SIZE,
    LOSS_SCALE_VALUE,
    MAX_SCALE_WINDOW,
    MIN_SCALE_WINDOW,
    SCALE_FACTOR,
    StepTable,
    build_dataset,
    build_model,
)

from mindformers_adaptive.integration.trainer import Trainer

init_context(use_parallel=False, context_config=ContextConfig(mode=0, device_target="CPU", device_id=0))
training_args = TrainingArguments(
    output_dir="output",
    num_train_epochs=1,
    batch_size=BATCH_SIZE,
    learning_rate=1e-3,
    sink_mode=False,
    scale_sense="AdaptiveLossScaleUpdateCell",
    loss_scale_value=LOSS_SCALE_VALUE,
    loss_scale_factor=SCALE_FACTOR,
    loss_scale_window=MIN_SCALE_WINDOW,
    max_scale_window=MAX_SCALE_WINDOW,
    min_scale_window=MIN_SCALE_WINDOW,
    use_clip_grad=True,
    max_grad_norm=1.0,
)
trainer = Trainer(args=training_args, model=build_model(), train_dataset=build_dataset(), callbacks=[StepTable()])
trainer.train()
