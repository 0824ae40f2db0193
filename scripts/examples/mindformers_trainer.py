"""MindFormers' Trainer with adaptive loss scaling selected by its name in TrainingArguments.

python scripts/examples/mindformers_trainer.py
"""

from mindformers import ContextConfig, TrainingArguments, init_context
from tiny_llama import BATCH_SIZE, StepTable, build_dataset, build_model

from mindformers_adaptive import Trainer

init_context(use_parallel=False, context_config=ContextConfig(mode=0, device_target="CPU", device_id=0))
training_args = TrainingArguments(
    output_dir="output",
    num_train_epochs=1,
    batch_size=BATCH_SIZE,
    learning_rate=1e-3,
    sink_mode=False,
    scale_sense="AdaptiveLossScaleUpdateCell",
    loss_scale_value=2**24,
    loss_scale_factor=2,
    # Scale windows of 1 to 4 steps, instead of the usual 20 to 1000, so that the window changes within a few steps.
    loss_scale_window=1,
    max_scale_window=4,
    min_scale_window=1,
    use_clip_grad=True,
    max_grad_norm=1.0,
)
trainer = Trainer(args=training_args, model=build_model(), train_dataset=build_dataset(), callbacks=[StepTable()])
trainer.train()
