"""torchvision's reference training: a ResNet-50 in channels-last, SGD, autocast, an average of weights."""

import math
import sys

import torch
import torchvision
from torch import nn

device = torch.device("cuda")
torch.backends.cudnn.benchmark = True
normalize = torchvision.transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
dataset = torchvision.datasets.FakeData(256, (3, 224, 224), 1000, torchvision.transforms.Compose(
    [torchvision.transforms.RandomHorizontalFlip(), torchvision.transforms.ToTensor(), normalize]
))  # fmt: skip
loader = torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True, num_workers=16, pin_memory=True)
model = torchvision.models.resnet50(weights=None, num_classes=1000).to(device, memory_format=torch.channels_last)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
scaler = torch.cuda.amp.GradScaler()
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 90)
average = torch.optim.swa_utils.AveragedModel(model, device=device)
for epoch in range(90):
    model.train()
    for image, target in loader:
        image, target = image.to(device, non_blocking=True), target.to(device, non_blocking=True)
        with torch.cuda.amp.autocast():
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        average.update_parameters(model)
        correct = output.topk(5, 1)[1].t().eq(target[None]).flatten().sum(dtype=torch.float32)
        print(f"loss {loss.item():.3f} top 5: {100 * correct.item() / len(target):.1f}")
        print(f"memory {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
        if not math.isfinite(loss.item()):
            sys.exit(1)
    schedule.step()
    torch.save(model.state_dict(), f"model_{epoch}.pth")
