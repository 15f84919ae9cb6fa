"""Images: a CNN with BatchNorm, trained from a DataLoader, then sampled around. Needs scikit-learn; under a minute."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from isosgd import Target, sample

torch.manual_seed(0)
digits = load_digits()
images = torch.as_tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)  # [1797, 1, 8, 8]
train, validation, test = random_split(TensorDataset(images, torch.as_tensor(digits.target)), [0.6, 0.2, 0.2])
loader = DataLoader(train, batch_size=64, shuffle=True)

model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
for _ in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

# In training mode BatchNorm normalises by the minibatch while sampling, and its statistics are refreshed for each draw.
model.train()
target = Target.from_module(model, "categorical", prior="empirical")
posterior = sample(target, loader, starts=[model], held_out=DataLoader(validation, batch_size=100))

x_test, y_test = next(iter(DataLoader(test, batch_size=len(test))))
print(posterior.against_start(x_test, y_test))
print(posterior.info["temperature_choice"]["reason"])
