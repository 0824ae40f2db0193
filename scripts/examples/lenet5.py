"""The network and the data of the LeNet5 examples: random images with random labels from a fixed seed."""

import numpy as np
from mindspore import dataset, nn
from mindspore.common.initializer import Normal

CLASSES = 10


class LeNet5(nn.Cell):
    """LeNet5 for images of 1 x 32 x 32."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, pad_mode="valid", weight_init=Normal(0.05))
        self.conv2 = nn.Conv2d(6, 16, 5, pad_mode="valid", weight_init=Normal(0.05))
        self.fc1 = nn.Dense(16 * 5 * 5, 120, weight_init=Normal(0.02))
        self.fc2 = nn.Dense(120, 84, weight_init=Normal(0.02))
        self.fc3 = nn.Dense(84, CLASSES, weight_init=Normal(0.02))
        self.relu = nn.ReLU()
        self.max_pool2d = nn.MaxPool2d(kernel_size=2, stride=2)
        self.flatten = nn.Flatten()

    def construct(self, images):
        features = self.max_pool2d(self.relu(self.conv1(images)))
        features = self.max_pool2d(self.relu(self.conv2(features)))
        features = self.relu(self.fc1(self.flatten(features)))
        return self.fc3(self.relu(self.fc2(features)))


def create_dataset(samples=1024, batch_size=32):
    """Return batches: images, float32 of shape (batch, 1, 32, 32), and one-hot labels, float32 of shape (batch, 10)."""
    random = np.random.default_rng(0)
    images = random.standard_normal((samples, 1, 32, 32)).astype(np.float32)
    labels = np.eye(CLASSES, dtype=np.float32)[random.integers(0, CLASSES, samples)]
    return dataset.NumpySlicesDataset((images, labels), ["data", "label"], shuffle=False).batch(batch_size)
