"""MFTrainOneStepCell with gradient clipping, trained by mindspore.train.Model; gradient accumulation is optional.

python scripts/examples/mindformers_train_step.py
python scripts/examples/mindformers_train_step.py --gradient_accumulation_steps 2
"""

import argparse

from mindformers import ContextConfig, init_context
from mindspore import nn
from mindspore.train import Model
from tiny_llama import BATCH_SIZE, StepTable, build_dataset, build_model

from mindformers_adaptive.integration.trainer import MeanOverMicroBatches
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFTrainOneStepCell

parser = argparse.ArgumentParser()
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
accumulation_steps = parser.parse_args().gradient_accumulation_steps

init_context(use_parallel=False, context_config=ContextConfig(mode=0, device_target="CPU", device_id=0))
model = build_model()
optimizer = nn.Momentum(model.trainable_params(), learning_rate=0.1, momentum=0.9)
# Windows of 1 to 4 steps, instead of the usual 20 to 1000, so that they change within these few steps.
manager = AdaptiveLossScaleUpdateCell(2**24, 2, scale_window=1, max_scale_window=4, min_scale_window=1)
network = MeanOverMicroBatches(model, accumulation_steps) if accumulation_steps > 1 else model
train_network = MFTrainOneStepCell(network, optimizer, use_clip_grad=True, max_grad_norm=1.0, scale_sense=manager)
train_network.set_train()
dataset = build_dataset(batch_size=BATCH_SIZE * accumulation_steps)
Model(train_network).train(1, dataset, callbacks=[StepTable()], dataset_sink_mode=False)
