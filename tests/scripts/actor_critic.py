"""Reinforcement learning: an actor and a critic on frames, actions drawn from a Categorical, clipped updates."""

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

device, actions, steps, games = "cuda", 6, 16, 64


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        )  # fmt: skip
        self.actor, self.critic = nn.Linear(512, actions), nn.Linear(512, 1)

    def forward(self, frames):
        hidden = self.seen(frames / 255.0)
        return Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)


model = ActorCritic().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4, eps=1e-5)
for update in range(10):
    frames, taken, odds, values, rewards = [], [], [], [], []
    for _ in range(steps):
        seen = torch.randint(256, (games, 4, 84, 84), device=device, dtype=torch.uint8).float()
        with torch.no_grad():
            policy, value = model(seen)
            action = policy.sample()
        frames.append(seen)
        taken.append(action)
        odds.append(policy.log_prob(action))
        values.append(value)
        rewards.append(torch.rand(games, device=device))
    returns, after = [], torch.zeros(games, device=device)
    for reward in reversed(rewards):
        after = reward + 0.99 * after
        returns.insert(0, after)
    frames, taken, odds, values, returns = map(torch.cat, (frames, taken, odds, values, returns))
    advantage = returns - values
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy, value = model(frames)
    ratio = (policy.log_prob(taken) - odds).exp()
    gain = torch.min(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage).mean()
    loss = F.mse_loss(value, returns) / 2 - gain - 0.01 * policy.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    print(f"update {update}: {loss.item():.3f}")
