"""timm's training: a ViT-B/16, mixup on the GPU, an optimizer of timm's factory, an average of weights, its logger."""

import logging

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, ModelEmaV3, NativeScaler

logging.basicConfig(filename="train.log", level=logging.INFO)
device = torch.device("cuda")
model = timm.create_model("vit_base_patch16_224", num_classes=1000, drop_path_rate=0.1).to(device)
model.set_grad_checkpointing()
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
scheduler = CosineLRScheduler(optimizer, t_initial=10)
mixup, criterion, scaler = Mixup(mixup_alpha=0.8, num_classes=1000), SoftTargetCrossEntropy().to(device), NativeScaler()
ema, losses = ModelEmaV3(model, decay=0.9998), AverageMeter()
images = torch.utils.data.TensorDataset(torch.rand(128, 3, 224, 224), torch.randint(0, 1000, (128,)))
loader = torch.utils.data.DataLoader(
    images, batch_size=32, shuffle=True, num_workers=8, pin_memory=True, drop_last=True
)
for update, (inputs, target) in enumerate(loader, 1):
    inputs, target = mixup(inputs.to(device), target.to(device))
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(inputs), target)
    scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    optimizer.zero_grad()
    ema.update(model, step=update)
    losses.update(loss.item(), inputs.size(0))
    scheduler.step_update(update)
    logging.info("update %d: loss %.3f", update, losses.avg)
