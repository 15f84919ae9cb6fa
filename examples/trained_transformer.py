"""Sequences: a transformer that reads digits row by row, then sampled around. Needs scikit-learn; under a minute."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from isosgd import Target, sample

torch.manual_seed(0)
digits = load_digits()
x = torch.as_tensor(digits.images / 16, dtype=torch.float32)  # eight tokens of eight numbers
x_train, x_rest, y_train, y_rest = train_test_split(x, torch.as_tensor(digits.target), test_size=0.4, random_state=0)
x_val, x_test, y_val, y_test = train_test_split(x_rest, y_rest, test_size=0.5, random_state=0)


class Reader(nn.Module):
    """Rows in, logits of the ten digits out."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(0.1 * torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=1)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Mean over tokens, then a linear layer."""
        return self.head(self.encoder(self.embed(x) + self.place).mean(1))


model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for _ in range(15):
    for rows in torch.randperm(len(x_train)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x_train[rows]), y_train[rows]).backward()
        optimizer.step()

# Dropout is off while sampling: the draws say what is not known. The call takes about 30 seconds at most.
target = Target.from_module(model, "categorical", prior="empirical")
posterior = sample(target, (x_train, y_train), starts=[model], held_out=(x_val, y_val), max_seconds=30)

print(posterior.against_start(x_test, y_test))
print(posterior.info["temperature_choice"]["reason"])
