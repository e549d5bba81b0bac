"""A classifier of tokens with torch's Transformer, and a moving average of its weights that is evaluated."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

device, width, length, batch, classes = torch.device("cuda"), 768, 256, 32, 1000


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(768, width)
        self.position = nn.Parameter(torch.zeros(1, length, width))
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, patches):
        return self.head(self.encoder(self.patches(patches) + self.position).mean(1))


model = Classifier().to(device)
average = copy.deepcopy(model).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
for step in range(10):
    patches = torch.rand(batch, length, 768, device=device)
    labels = torch.randint(classes, (batch,), device=device)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(patches), labels, label_smoothing=0.1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.001)
        guessed = average(patches).argmax(-1)
    print(step, loss.item(), (guessed == labels).float().mean().item())
