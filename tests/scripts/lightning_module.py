"""Lightning: a module with its training step, the Trainer's loop, bf16 by autocast, a checkpoint at each epoch."""

import lightning
import torch
from torch import nn
from torch.nn import functional as F


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
        self.embedding, self.encoder = (
            nn.Embedding(30_000, 512),
            nn.TransformerEncoder(layer, 6, enable_nested_tensor=False),
        )
        self.head = nn.Linear(512, 10)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(1))

    def training_step(self, batch, _):
        tokens, labels = batch
        loss = F.cross_entropy(self(tokens), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


data = torch.utils.data.TensorDataset(torch.randint(0, 30_000, (512, 256)), torch.randint(0, 10, (512,)))
trainer = lightning.Trainer(max_epochs=1, accelerator="gpu", devices=1, precision="bf16-mixed", gradient_clip_val=1.0)
trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=32, num_workers=2))
