"""A Wasserstein GAN with a gradient penalty: gradients of gradients, five steps of the critic for one of the maker."""

import torch
from torch import nn

device, batch, latent, width = torch.device("cuda"), 64, 128, 64


def up(inputs, outputs):
    return nn.Sequential(nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU())


def down(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 4, 2, 1), nn.InstanceNorm2d(outputs), nn.LeakyReLU(0.2))


maker = nn.Sequential(
    nn.ConvTranspose2d(latent, 8 * width, 4),
    nn.ReLU(),
    up(8 * width, 4 * width),
    up(4 * width, 2 * width),
    up(2 * width, width),
    nn.ConvTranspose2d(width, 3, 4, 2, 1),
    nn.Tanh(),
).to(device)
critic = nn.Sequential(
    down(3, width),
    down(width, 2 * width),
    down(2 * width, 4 * width),
    down(4 * width, 8 * width),
    nn.Conv2d(8 * width, 1, 4),
    nn.Flatten(0),
).to(device)
makes = torch.optim.Adam(maker.parameters(), lr=1e-4, betas=(0.0, 0.9))
judges = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))


def penalty(real, made):
    share = torch.rand(len(real), 1, 1, 1, device=device)
    between = (share * real + (1 - share) * made).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((gradient.flatten(1).norm(dim=1) - 1) ** 2).mean()


for step in range(50):
    real = torch.rand(batch, 3, 64, 64).to(device) * 2 - 1
    made = maker(torch.randn(batch, latent, 1, 1, device=device)).detach()
    judges.zero_grad()
    loss = critic(made).mean() - critic(real).mean() + 10 * penalty(real, made)
    loss.backward()
    judges.step()
    if step % 5 == 4:
        makes.zero_grad()
        (-critic(maker(torch.randn(batch, latent, 1, 1, device=device))).mean()).backward()
        makes.step()
        print(step, loss.item())
