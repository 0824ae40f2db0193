"""MindFormers' Trainer with a train-step cell made in Python; it saves checkpoints and resumes from one of them.

python scripts/examples/mindformers_trainer_wrapper.py
python scripts/examples/mindformers_trainer_wrapper.py CKP_rank_0-1_16.ckpt
"""

import sys

from mindformers import ContextConfig, TrainingArguments, init_context
from mindspore import nn
from tiny_llama import BATCH_SIZE, StepTable, build_dataset, build_model

from mindformers_adaptive import Trainer
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFTrainOneStepCell

init_context(use_parallel=False, context_config=ContextConfig(mode=0, device_target="CPU", device_id=0))
training_args = TrainingArguments(
    output_dir="output", num_train_epochs=1, batch_size=BATCH_SIZE, sink_mode=False, save_steps=16, save_total_limit=5
)
model = build_model()
optimizer = nn.Momentum(model.trainable_params(), learning_rate=0.1, momentum=0.9)
# Scale windows of 1 to 4 steps, instead of the usual 20 to 1000, so that the window changes within a few steps.
update_cell = AdaptiveLossScaleUpdateCell(2**24, 2, scale_window=1, max_scale_window=4, min_scale_window=1)
train_network = MFTrainOneStepCell(model, optimizer, use_clip_grad=True, max_grad_norm=1.0, scale_sense=update_cell)
trainer = Trainer(
    task="text_generation",
    args=training_args,
    wrapper=train_network,
    train_dataset=build_dataset(),
    callbacks=[StepTable()],
)
if len(sys.argv) > 1:
    # In MindFormers 1.9.0, resume_from_checkpoint is the folder of the checkpoints, and resume_training names the file.
    trainer.train(resume_from_checkpoint="output/checkpoint", resume_training=sys.argv[1])
else:
    trainer.train()
