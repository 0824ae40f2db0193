"""The example with Trainer on MindFormers' page about adaptive loss scaling, with a model that fits a CPU.

python scripts/examples/mindformers_trainer_from_wrapper.py

The example differs from the page in the imports from mindformers_adaptive, the device, the model and its name, and the
number and length of the samples.
Training and evaluation have a dataset each, because MindSpore lets one dataset feed one pipeline only.
"""

import numpy as np
from mindformers import ContextConfig, TrainingArguments, init_context
from mindspore.dataset import GeneratorDataset
from mindspore.nn import Momentum
from tiny_llama import SEQ_LENGTH, build_model

from mindformers_adaptive import Trainer
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFTrainOneStepCell


def context_init():
    """init context for mindspore."""
    context_config = ContextConfig(mode=0, device_target="CPU", device_id=0)
    init_context(use_parallel=False, context_config=context_config)


def generator():
    """text dataset generator."""
    seq_len = SEQ_LENGTH + 1
    input_ids = np.random.randint(low=0, high=15, size=(seq_len,)).astype(np.int32)
    for _ in range(64):
        yield input_ids


context_init()
training_args = TrainingArguments(
    num_train_epochs=3, batch_size=2, learning_rate=0.001, warmup_steps=1000, sink_mode=True
)
model = build_model()
opt = Momentum(learning_rate=0.1, momentum=0.9, params=model.trainable_params())
update_cell = AdaptiveLossScaleUpdateCell(1, 2, 20, 1000, 20)
train_network = MFTrainOneStepCell(model, opt, scale_sense=update_cell)
train_network.set_train()
train_dataset = GeneratorDataset(generator, column_names=["input_ids"]).batch(batch_size=4)
eval_dataset = GeneratorDataset(generator, column_names=["input_ids"]).batch(batch_size=4)
text_generation = Trainer(
    task="text_generation",
    model_name="common",
    wrapper=train_network,
    args=training_args,
    train_dataset=train_dataset,
    eval_dataset=eval_dataset,
)
text_generation.train()
print(update_cell.state())
