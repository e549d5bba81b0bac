"""What can be chosen for a training run, and what is refused, by name."""

import dataclasses

import pytest

from course_utils.models import PRESETS, TransformerConfig
from course_utils.run import OPTIMIZERS, PRECISIONS, TrainingRun

RUN = TrainingRun("gpt2-xl", micro_batch=32)


def test_equal_runs_are_one_key_however_they_are_written():
    spelled_out = TrainingRun("gpt2-xl", 32, 1024, "amp-bf16", "adamw", "flash", "none", 1, 1)
    again = TrainingRun(
        PRESETS["gpt2-xl"], 32, precision=PRECISIONS["amp-bf16"], optimizer=OPTIMIZERS["adamw"]
    )
    assert len({RUN, spelled_out, again}) == 1
    assert TrainingRun("gpt2-xl", micro_batch=31) != RUN


def test_the_global_batch_counts_every_rank_and_micro_batch_and_can_be_set():
    run = TrainingRun("gpt2", micro_batch=4, seq_len=512, accumulation_steps=3, world_size=2)
    assert run.global_batch == 24
    assert TrainingRun("gpt2", micro_batch=4, seq_len=512, global_batch=24, world_size=2) == run
    assert RUN.replace(accumulation_steps=4).replace(global_batch=64).accumulation_steps == 2
    assert RUN.replace(accumulation_steps=4).replace(global_batch=None).accumulation_steps == 4


@pytest.mark.parametrize(
    "run",
    [
        TrainingRun("llama3-8b", 2, 4096, "bf16-master", "adamw-fused", "efficient", "full", 4),
        TrainingRun("llama3-8b", logits="compute", clip_grad_norm=1.0, dropout=0.5),
        TrainingRun("gpt2", world_size=8, zero_stage=1, bucket_view=True, card="H100-80GB"),
        TrainingRun("gpt2", lora_rank=4, lora_targets="mlp", frozen_bits=8),
        TrainingRun(dataclasses.replace(PRESETS["gpt2"], layers=3), 1, 64),
    ],
    ids=str,
)
def test_code_makes_an_equal_run(run):
    assert eval(run.code(), {"TrainingRun": TrainingRun, "TransformerConfig": TransformerConfig}) == run


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recompute": "full", "accumulation_steps": 2}, "full recomputation · 2 micro-batches"),
        (
            {"recompute": "offload", "world_size": 4, "zero_stage": 1},
            "activations offloaded · 4 ranks · ZeRO-1",
        ),
        (
            {"clip_grad_norm": 1.0, "set_to_none": False},
            "gradients clipped at 1 · gradients zeroed, not freed",
        ),
        ({"lora_rank": 4, "frozen_bits": 4}, "LoRA of rank 4 on qkv, out · frozen in 4 bits"),
    ],
    ids=str,
)
def test_words_for_a_run_name_each_unusual_choice(changes, words):
    assert str(RUN) == "gpt2-xl · b=32 · s=1,024 · amp-bf16 · adamw · flash attention"
    assert str(RUN.replace(**changes)) == f"{RUN} · {words}"


@pytest.mark.parametrize(
    ("hidden", "heads", "attention", "said"),
    [(768, 1, "flash", "up to 256"), (60, 4, "efficient", "multiples of 8")],
)
def test_heads_that_a_kernel_cannot_take_are_refused(hidden, heads, attention, said):
    model = TransformerConfig("m", "gpt2", 2, hidden, heads, vocab=300, max_positions=128)
    with pytest.raises(ValueError, match=said):
        TrainingRun(model, seq_len=64, attention=attention)
    assert TrainingRun(model, seq_len=64, attention="eager").model == model


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"microbatch": 4}, "unknown choice of a TrainingRun 'microbatch': did you mean 'micro_batch'"),
        ({"seq_len": 1025}, "1,025 tokens is longer than the 1,024 positions of gpt2-xl"),
        ({"precision": "fp32"}, "flash kernel computes in 16 bits only, not in fp32: choose attention="),
        ({"micro_batch": 4, "world_size": 2, "global_batch": 10}, r"global batch of 10 .* 4 · 2 = 8"),
        ({"accumulation_steps": 2, "global_batch": 64}, "not both"),
        ({"micro_batch": 10**12}, "cannot be meant"),
        ({"zero_stage": 1}, "set world_size to 2 or more"),
        ({"tensor_parallel": 2}, "does not divide 25 heads"),
        ({"tensor_parallel": 5, "sequence_parallel": True}, "does not divide a sequence of 1024"),
        ({"frozen_bits": 8}, "freeze them with lora_rank above 0"),
        ({"lora_rank": 4, "frozen_bits": 8, "precision": "tf32", "attention": "eager"}, "a 16-bit precision"),
        ({"lora_rank": 4, "model": "mixtral-8x7b"}, "mixture of experts is not covered"),
    ],
    ids=str,
)
def test_what_is_absurd_or_contradicts_another_choice_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        RUN.replace(**changes)
