"""Speech to letters: convolutions over a spectrogram, a bidirectional LSTM, CTC loss."""

import torch
from torch import nn

device, letters, batch, frames = torch.device("cuda"), 29, 16, 800


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv2d(1, 32, (11, 11), stride=(2, 2), padding=(5, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20, inplace=True),
            nn.Conv2d(32, 32, (11, 11), stride=(2, 1), padding=(5, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20, inplace=True),
        )
        self.lstm = nn.LSTM(32 * 20, 512, num_layers=3, bidirectional=True, batch_first=True)
        self.head = nn.Linear(1024, letters)

    def forward(self, sound):
        heard = self.front(sound).flatten(1, 2).transpose(1, 2)
        return self.head(self.lstm(heard)[0]).log_softmax(-1)


model = Listener().to(device)
criterion = nn.CTCLoss(blank=0, zero_infinity=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step in range(10):
    sound = torch.randn(batch, 1, 80, frames).to(device)
    lengths = torch.randint(20, 100, (batch,), dtype=torch.int32)
    words = torch.randint(1, letters, (int(lengths.sum()),), dtype=torch.int32).to(device)
    said = model(sound).transpose(0, 1)
    heard = torch.full((batch,), said.shape[0], dtype=torch.int32).to(device)
    loss = criterion(said, words, heard, lengths.to(device))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 400)
    optimizer.step()
    print(step, loss.item())
