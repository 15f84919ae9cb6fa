"""A table of few rows: an MLP that Adam has made too sure of itself, then sampled around. Needs scikit-learn."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from isosgd import Target, sample

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x = torch.as_tensor(x / 16, dtype=torch.float32)
x_train, x_rest, y_train, y_rest = train_test_split(x, torch.as_tensor(y), test_size=0.7, random_state=0)
x_val, x_test, y_val, y_test = train_test_split(x_rest, y_rest, test_size=0.5, random_state=0)

# The training as it was. Nothing in it knows of what comes after.
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(100):
    for rows in torch.randperm(len(x_train)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x_train[rows]), y_train[rows]).backward()
        optimizer.step()

# Draws around the trained network. Validation data, on which it was not trained, choose the temperature.
target = Target.from_module(model, "categorical", prior="empirical")
posterior = sample(target, (x_train, y_train), starts=[model], held_out=(x_val, y_val))

print(posterior.against_start(x_test, y_test))
print(posterior.info["temperature_choice"]["reason"])
probabilities = posterior.predict(x_test).mean
sure, digit = probabilities.max(1)
for row in sure.argsort()[:3].tolist():
    print(f"least sure: row {row}, a {y_test[row]}, taken for {digit[row]} with p = {sure[row]:.2f}")
