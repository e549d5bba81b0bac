"""A language model with an LSTM: padded sequences, a schedule, an accuracy that is printed."""

from sys import argv

import torch
from torch import nn

vocab, width, layers, batch, length = map(int, argv[1:6] or (10_000, 256, 1, 16, 24))
device = torch.device("cuda:0")


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, words):
        return self.head(self.lstm(self.embedding(words))[0])


model = Tagger().to(device)
optimizer, criterion = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), nn.CrossEntropyLoss(ignore_index=0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
for epoch in range(20):
    lengths = torch.randint(2, length + 1, (batch,))
    words = torch.nn.utils.rnn.pad_sequence([torch.randint(1, vocab, (n,)) for n in lengths.tolist()], True).to(device)
    model.zero_grad()
    logits = model(words)
    loss = criterion(logits.flatten(0, 1), words.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    scheduler.step()
    correct = (logits.argmax(-1) == words).float().mean().item()
    print(epoch, loss.item(), correct)
