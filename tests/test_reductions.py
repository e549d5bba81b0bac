"""Partial sums that a sum takes on a GPU, by the sizes that an H200's allocator recorded."""

import pytest
import torch
from gpu.histories import entries_of

from course_utils.gpus import GPUS, recognized
from course_utils.measuring.reductions import partial_sums
from course_utils.measuring.simulated import simulated_gpu
from course_utils.measuring.tracker import Tracker
from course_utils.units import GB

H200 = GPUS["H200-141GB"]
EAGER_GPT = "nanogpt.py_TORCHDYNAMO_DISABLE_1"
BLOOM = "hugging_face.py_bloom"

RECORDED = [
    (EAGER_GPT, 8192, 768, torch.bfloat16, [50_331_648, 24]),
    (EAGER_GPT, 8192, 3072, torch.bfloat16, [138_412_032, 96]),
    (EAGER_GPT, 8192, 2304, torch.bfloat16, [139_198_464, 72]),
    (BLOOM, 1024, 1024, torch.float32, [8_388_608, 32]),
    (BLOOM, 1024, 4096, torch.float32, [33_554_432, 128]),
    (BLOOM, 1024, 3072, torch.float32, [25_165_824, 96]),
]
"""A script's gradients of layers with a bias, and the two blocks that it allocated one after the other."""


@pytest.mark.parametrize(("script", "rows", "columns", "dtype", "blocks"), RECORDED)
def test_a_gradient_s_sum_takes_what_the_card_allocated(script, rows, columns, dtype, blocks):
    sizes = [entry["size"] for entry in entries_of(script) if entry["action"] == "alloc"]
    assert blocks in [sizes[index : index + 2] for index in range(len(sizes))]
    gradient = torch.empty(rows, columns, dtype=dtype, device="meta")
    assert partial_sums(gradient, [0], H200) == blocks
    by_batch = gradient.view(8, rows // 8, columns)
    assert partial_sums(by_batch, [0, 1], H200) == blocks


def test_what_needs_no_other_block_takes_nothing():
    gradient = torch.empty(8192, 768, dtype=torch.bfloat16, device="meta")
    unknown = recognized("NVIDIA Somebody's", 40 * GB, (9, 0))
    assert partial_sums(gradient, [1], H200) == []
    assert partial_sums(gradient[:512], [0], H200) == []
    assert partial_sums(gradient.double(), [0], H200) == partial_sums(gradient, [0], unknown) == []
    # one number: 132 multiprocessors with 4 blocks of 512 threads
    assert partial_sums(gradient, None, H200) == [4 * 528, 4]


def test_a_smaller_card_has_fewer_blocks_and_a_run_without_one_leaves_them_out():
    taken = {}
    for name in ("H200-141GB", "A100-40GB", ""):
        with simulated_gpu("auto"), Tracker("cuda", None, GPUS.get(name)) as tracker:
            torch.empty(8192, 3072, device="cuda").sum(0)
        taken[name] = [size for size, storage in tracker.events if storage.dtype == "uint8" and size > 0]
    # 2,048 threads of 108 multiprocessors instead of 132, in blocks of 128 for 24 groups of outputs
    assert taken == {"H200-141GB": [138_412_032, 512], "A100-40GB": [4 * 3072 * 72 * 128, 512], "": []}
