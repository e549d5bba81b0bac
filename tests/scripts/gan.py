"""A GAN: a generator and a discriminator, each with an optimizer of its own."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--latent", type=int, default=100)
args = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def layers(inputs, outputs, last):
    wide = args.width
    return nn.Sequential(nn.Linear(inputs, wide), nn.LeakyReLU(0.2), nn.Linear(wide, outputs), last).to(device)


generator, discriminator = layers(args.latent, 784, nn.Tanh()), layers(784, 1, nn.Sigmoid())
criterion = nn.BCELoss()
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
ones, zeros = torch.ones(args.batch_size, 1, device=device), torch.zeros(args.batch_size, 1, device=device)
for epoch in range(100):
    real = torch.rand(args.batch_size, 784).to(device)
    fake = generator(torch.randn(args.batch_size, args.latent, device=device))
    optimizer_d.zero_grad()
    loss_d = criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)
    loss_d.backward()
    optimizer_d.step()
    optimizer_g.zero_grad()
    loss_g = criterion(discriminator(fake), ones)
    loss_g.backward()
    optimizer_g.step()
    print(f"{epoch}: {loss_d.item():.3f} {loss_g.item():.3f}")
