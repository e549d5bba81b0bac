"""torchvision's RetinaNet with a ResNet-50: images of two sizes, boxes, losses in a dictionary."""

import torch
import torchvision

device = torch.device("cuda")
model = torchvision.models.detection.retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91)
model.to(device).train()
weights = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = torch.optim.SGD(weights, lr=0.01, momentum=0.9, weight_decay=1e-4)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.001, total_iters=1000)
sizes = ((480, 640), (600, 800), (480, 640), (800, 600))
for step in range(10):
    images = [torch.rand(3, *size).to(device) for size in sizes]
    corners = torch.tensor([[20.0, 30.0, 200.0, 260.0], [100.0, 80.0, 400.0, 300.0]])
    targets = [{"boxes": corners.to(device), "labels": torch.tensor([1, 17]).to(device)} for _ in sizes]
    losses = model(images, targets)
    loss = sum(losses.values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warm_up.step()
    print(step, {name: round(value.item(), 3) for name, value in losses.items()})
