"""What cuDNN allocates besides the tensors of a convolution. One JSON line per case, as it comes.

    python tests/gpu/convolution_workspace.py > tests/gpu/recorded/convolution_workspace.jsonl

`forward_extra` are the bytes above inputs, weights and output, `backward_extra` those above these and the
gradients.
"""

import json

import torch
from torch import nn

FORMATS = ((torch.float32, False), (torch.float16, False), (torch.float16, True), (torch.bfloat16, True))
SHAPES = (
    # channels in and out, kernel, stride, height and width, batch
    (3, 64, 7, 2, 224, 64), (64, 64, 3, 1, 56, 64), (128, 128, 3, 1, 28, 64), (256, 512, 1, 1, 28, 64),
    (512, 512, 3, 1, 7, 64), (96, 96, 3, 1, 128, 16), (192, 384, 3, 1, 64, 16),
)  # fmt: skip


def counted(
    cin: int,
    cout: int,
    kernel: int,
    stride: int,
    size: int,
    batch: int,
    dtype: torch.dtype,
    channels_last: bool,
    *,
    benchmark: bool = False,
    tf32: bool = True,
    groups: int = 1,
    transposed: bool = False,
) -> dict[str, object]:
    """One convolution's choices, and the bytes that it took besides its tensors."""
    row = dict(locals()) | {"dtype": str(dtype).removeprefix("torch.")}
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.allow_tf32 = tf32
    torch.cuda.empty_cache()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    padding = 1 if transposed else kernel // 2
    layer = kind(cin, cout, kernel, stride, padding, groups=groups, bias=False, device="cuda", dtype=dtype)
    layer = layer.to(memory_format=layout)  # pyrefly: ignore [no-matching-overload]
    x = torch.randn(batch, cin, size, size, device="cuda", dtype=dtype)
    x = x.to(memory_format=layout).requires_grad_()
    before = settled()
    y = layer(x)
    torch.cuda.synchronize()
    row["forward_extra"] = torch.cuda.max_memory_allocated() - before - y.nbytes
    gradient = torch.ones_like(y)
    before = settled()
    y.backward(gradient)
    torch.cuda.synchronize()
    assert x.grad is not None and layer.weight.grad is not None
    gradients = x.grad.nbytes + layer.weight.grad.nbytes
    row["backward_extra"] = torch.cuda.max_memory_allocated() - before - gradients
    return row


def settled() -> int:
    """Bytes that are allocated now; the maximum begins anew."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


if __name__ == "__main__":
    card, release = torch.cuda.get_device_name(), torch.__version__
    print(json.dumps({"device": card, "torch": release, "cudnn": torch.backends.cudnn.version()}))
    for benchmark in (False, True):
        for dtype, channels_last in FORMATS:
            for shape in SHAPES:
                print(json.dumps(counted(*shape, dtype, channels_last, benchmark=benchmark)), flush=True)
    fp32 = (torch.float32, False)
    print(json.dumps(counted(96, 96, 3, 1, 128, 16, *fp32, tf32=False)))
    print(json.dumps(counted(64, 64, 3, 1, 56, 64, *fp32, groups=64)))
    print(json.dumps(counted(512, 256, 4, 2, 16, 64, *fp32, transposed=True)))
